"""Who took part when, and what went wrong."""

from collections import Counter

from collapipe.errors import printable
from collapipe.run_report.drawing import note
from collapipe.run_report.markup import Markup, details, join, table
from collapipe.run_report.matrix import Kind, matrix
from collapipe.runs.reading import Run

_TRAINED, _SCHEDULED = Kind("trained", "c0"), Kind("took part", "c0")
_FAILED = Kind("failed", "c1", 0.5, 0.5)
_EXCLUDED = Kind("set aside, could not be planned with", "c3", 0.35, 0.3)
_SKIPPED = Kind("round skipped", "skipped")


def participation(run: Run) -> Markup:
    """Units by rounds, and what went wrong."""
    if not run.rounds:
        return note("No round was finished.")
    took_part = _TRAINED if run.trained else _SCHEDULED
    cells = {
        _SKIPPED: [
            (n, line.round) for line in run.rounds if line.skipped for n in range(run.num_units)
        ],
        took_part: [(unit, line.round) for line in run.rounds for unit in line.units],
        _FAILED: [(unit, line.round) for line in run.rounds for unit in line.failures],
        _EXCLUDED: [(unit, line.round) for line in run.rounds for unit in line.excluded],
    }
    shown = {kind: where for kind, where in cells.items() if where}
    counts = Counter(unit for unit, _ in cells[took_part])
    told = [
        f"{counts[unit]}, {counts[unit] / len(run.rounds):.0%}" for unit in range(run.num_units)
    ]
    chart = matrix("Who took part in which round", _names(run), _columns(run), shown, told)
    return join(chart, note("An empty cell: the unit was idle."), _events(run))


def _names(run: Run) -> list[str]:
    return [f"unit {unit}" for unit in range(run.num_units)]


def _columns(run: Run) -> list[int]:
    return [line.round for line in run.rounds]


def _events(run: Run) -> Markup | None:
    rows: list[list[object]] = []
    for line in run.rounds:
        if line.skipped:
            rows.append([line.round, "–", "round skipped", printable(line.skipped)])
        for what, causes in (("failed", line.failures), ("set aside", line.excluded)):
            rows += [[line.round, unit, what, printable(why)] for unit, why in causes.items()]
    if not rows:
        return None
    whole = table(["round", "unit", "what", "why"], rows, "Failures and skipped rounds", words=True)
    return details(f"What went wrong, and why ({len(rows)})", whole)
