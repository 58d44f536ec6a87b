"""Show how much the run's server could read, as measured by ``collapipe audit``."""

from string import ascii_letters

from collapipe.audit import sections
from collapipe.audit.result import Audit, Condition, read_audit
from collapipe.formatting import counted
from collapipe.run_report.charts import Kind, Series, colour_of, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, join, note, table, tag
from collapipe.runs.reading import Run


def privacy(run: Run) -> Markup | None:
    """Show shares of recovered tokens; None without an audit.

    Raises ``ConfigError`` if the audit is invalid.
    """
    found = read_audit(run.folder)
    if found is None:
        return None
    explanation = (
        f"{counted(found.rows, 'validation row')} with {counted(found.tokens, 'token')}, attacked "
        f"with {counted(found.public_rows, 'public row')} by CollaPipe {found.version}. Tables "
        "have percent of tokens with 95 % intervals; frozen: the first weights without dropout, "
        "trained: the last ones with dropout."
    )
    return join(
        _age(found, len(run.rounds)),
        tag("p", f"{sections.headline(found)} {sections.baseline(found)}"),
        charts(
            _curves(found, "blocks", "encoder blocks"),
            _curves(found, "precision", "bits of a number"),
            _curves(found, "noise", "noise"),
        ),
        _bars(found),
        *(
            table(["weights", *columns[1:]], cells, title)
            for title, columns, cells in sections.tables(found)
        ),
        tag("p", f"{found.targets} Updates: {sections.updates_text(found)}."),
        tag("p", f"Membership: {sections.membership_text(found)}."),
        note(explanation),
    )


def _age(found: Audit, rounds: int) -> Markup | None:
    """Return a paragraph if the run was resumed after the audit; ``rounds`` counts its rounds."""
    if found.trained_rounds in (None, rounds):
        return None
    return tag(
        "p",
        f"This audit attacked the model after round {found.trained_rounds}, and the run has "
        f"{counted(rounds, 'round')} now; audit it again for figures of its last model.",
    )


def _curves(found: Audit, field: str, across: str) -> Markup:
    series = []
    for style, attack in enumerate(sections.ATTACKS):
        each = sections.recovered(found, field, attack, "trained")
        if len(each) > 1:
            shares = {_place(r.condition, field): r.all_tokens for r in each}
            points = [(x, 100 * share.value) for x, share in sorted(shares.items())]
            band = [(x, 100 * share.low, 100 * share.high) for x, share in sorted(shares.items())]
            series.append(Series(attack, style, points, band=band))
    return lines(f"Tokens recovered by {across}", across, "%", series, zero=True)


def _place(condition: Condition, field: str) -> float:
    """Return the place on the axis; for a precision its bits, which are in its name."""
    return float(str(getattr(condition, field)).strip(ascii_letters))


def _bars(found: Audit) -> Markup | None:
    """Return bars by rows that are sent; None if all tokens' rows are sent."""
    bars = [
        stacked(
            f"{sections.SENT[each.condition.reads]}, {attack}",
            [(Kind("", colour_of(style)), 100 * each.all_tokens.value)],
            sections.percent(each.all_tokens),
        )
        for style, attack in enumerate(sections.ATTACKS)
        for each in sections.recovered(found, "reads", attack, "trained")
    ]
    more = found.sent.reads in ("first", "labelled")
    return rows("Tokens recovered by rows sent", "%", bars, wide=True) if more else None
