"""What the run's server could read, as ``collapipe audit`` has measured it."""

from collapipe.audit.result import Audit, Recovery, read_audit
from collapipe.audit.sections import (
    ATTACKS,
    COLUMNS,
    UPDATE_COLUMNS,
    UPDATE_TITLE,
    baseline,
    chosen,
    headline,
    membership_text,
    tables,
    update_rows,
    updates_text,
)
from collapipe.run_report.charts import Point, Series, lines
from collapipe.run_report.html import Markup, charts, join, note, table, tag
from collapipe.runs.reading import Run


def privacy(run: Run) -> Markup | None:
    """Shares of tokens recovered; None where the run has no audit. Raises ``ConfigError``."""
    found = read_audit(run.folder)
    if found is None:
        return None
    rows = update_rows(found)
    told = (
        f"{found.rows} validation rows with {found.tokens:,} tokens, attacked with "
        f"{found.public_rows:,} public rows by CollaPipe {found.version}. Tables have percent of "
        "tokens with 95 % intervals; frozen: the first weights without dropout, trained: the last "
        "ones with dropout."
    )
    return join(
        tag("p", f"{headline(found)} {baseline(found)}"),
        charts(_curves(found, "blocks", "encoder blocks"), _curves(found, "noise", "noise")),
        *(table(["weights", *COLUMNS[1:]], cells, title) for title, cells in tables(found)),
        *([table(["weights", *UPDATE_COLUMNS[1:]], rows, UPDATE_TITLE)] if rows else []),
        tag("p", f"{found.targets} Updates: {updates_text(found)}."),
        tag("p", f"Membership: {membership_text(found)}."),
        note(told),
    )


def _curves(found: Audit, field: str, across: str) -> Markup:
    """What each attack recovers of what the trained model sends."""
    series = []
    for style, attack in enumerate(ATTACKS):
        each = [
            r for r in chosen(found, field) if (r.attack, r.condition.state) == (attack, "trained")
        ]
        if len(each) > 1:
            series.append(_series(attack, style, field, each))
    return lines(f"Tokens recovered by {across}", across, "%", series, zero=True)


def _series(name: str, style: int, field: str, recoveries: list[Recovery]) -> Series:
    points, band = list[Point](), []
    for each in sorted(recoveries, key=lambda r: float(getattr(r.condition, field))):
        x, share = float(getattr(each.condition, field)), each.all_tokens
        points.append((x, 100 * share.value))
        band.append((x, 100 * share.low, 100 * share.high))
    return Series(name, style, points, band=band)
