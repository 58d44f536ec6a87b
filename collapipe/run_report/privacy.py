"""Show how much the run's server could read, as measured by ``collapipe audit``."""

from string import ascii_letters

from collapipe.audit.result import Attack, Audit, Condition, Recovery, read_audit
from collapipe.audit.sections import (
    ATTACKS,
    COLUMNS,
    SENT,
    UPDATE_COLUMNS,
    UPDATE_TITLE,
    baseline,
    chosen,
    headline,
    membership_text,
    percent,
    tables,
    update_rows,
    updates_text,
)
from collapipe.run_report.charts import Kind, Point, Series, colour_of, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, join, note, table, tag
from collapipe.runs.reading import Run


def privacy(run: Run) -> Markup | None:
    """Show shares of recovered tokens; None without an audit.

    Raises ``ConfigError`` if the audit is invalid.
    """
    found = read_audit(run.folder)
    if found is None:
        return None
    updates = update_rows(found)
    told = (
        f"{found.rows} validation rows with {found.tokens:,} tokens, attacked with "
        f"{found.public_rows:,} public rows by CollaPipe {found.version}. Tables have percent of "
        "tokens with 95 % intervals; frozen: the first weights without dropout, trained: the last "
        "ones with dropout."
    )
    return join(
        tag("p", f"{headline(found)} {baseline(found)}"),
        charts(
            _curves(found, "blocks", "encoder blocks"),
            _curves(found, "precision", "bits of a number"),
            _curves(found, "noise", "noise"),
        ),
        _bars(found),
        *(table(["weights", *COLUMNS[1:]], cells, title) for title, cells in tables(found)),
        *([table(["weights", *UPDATE_COLUMNS[1:]], updates, UPDATE_TITLE)] if updates else []),
        tag("p", f"{found.targets} Updates: {updates_text(found)}."),
        tag("p", f"Membership: {membership_text(found)}."),
        note(told),
    )


def _trained(found: Audit, field: str, attack: Attack) -> list[Recovery]:
    """Return an attack's recovery from the trained model's activations, by ``field``."""
    every = chosen(found, field)
    return [r for r in every if (r.attack, r.condition.state) == (attack, "trained")]


def _curves(found: Audit, field: str, across: str) -> Markup:
    series = []
    for style, attack in enumerate(ATTACKS):
        each = _trained(found, field, attack)
        if len(each) > 1:
            series.append(_series(attack, style, field, each))
    return lines(f"Tokens recovered by {across}", across, "%", series, zero=True)


def _series(name: str, style: int, field: str, recoveries: list[Recovery]) -> Series:
    points, band = list[Point](), []
    for each in sorted(recoveries, key=lambda r: _place(r.condition, field)):
        x, share = _place(each.condition, field), each.all_tokens
        points.append((x, 100 * share.value))
        band.append((x, 100 * share.low, 100 * share.high))
    return Series(name, style, points, band=band)


def _place(condition: Condition, field: str) -> float:
    """Return the place on the axis; for a precision its bits, which are in its name."""
    return float(str(getattr(condition, field)).strip(ascii_letters))


def _bars(found: Audit) -> Markup | None:
    """Return bars by rows that are sent; None if all tokens' rows are sent."""
    bars = [
        stacked(
            f"{SENT[each.condition.reads]}, {attack}",
            [(Kind("", colour_of(style)), 100 * each.all_tokens.value)],
            percent(each.all_tokens),
        )
        for style, attack in enumerate(ATTACKS)
        for each in _trained(found, "reads", attack)
    ]
    more = found.sent.reads in ("first", "labelled")
    return rows("Tokens recovered by rows sent", "%", bars, wide=True) if more else None
