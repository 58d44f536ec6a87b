"""Virtual queues, drift, and what the convergence bound assumes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from collapipe.run_report.drawing import note
from collapipe.run_report.lines import Series, lines
from collapipe.run_report.markup import Markup, join, table, tag
from collapipe.runs.reading import Run, option

_MOST_LINES, _LIMIT_STYLE = 8, 13


def queues(run: Run) -> Markup:
    """Y and Γ of each round."""
    if not run.keeps_queues:
        return join(note("The strategy keeps no queues."), _assumptions(run))
    queues_ = [(line.round, line.queues) for line in run.rounds]
    charts = [
        _by_unit(run, "Virtual queues Y after each round", "Y", queues_),
        _mean_drift(run),
    ]
    return join(tag("div", *charts, class_="charts"), _assumptions(run))


_ASSUMED = {
    "φ², bound of ‖∇F‖²": "gradient_bound",
    "β, smoothness": "smoothness",
    "ξ, curvature": "curvature",
    "κ = βη²/(2N)": "kappa",
    "C, W": "interference_constant_w",
    "Γ max": "gamma_max",
    "V, 1/s": "drift_weight",
}


def _assumptions(run: Run) -> Markup | None:
    """What the bound assumes: as training showed it, and as the strategy has it."""
    estimates = next((e for line in reversed(run.rounds) if (e := line.estimates)), None)
    known = [
        [name, _figure(getattr(estimates, field, None)), _figure(option(run, f"strategy.{field}"))]
        for name, field in _ASSUMED.items()
    ]
    rows: list[list[object]] = [[*row] for row in known if row[1:] != ["–", "–"]]
    if not rows:
        return None
    columns = ["what the bound assumes", "estimated from training", "set for the strategy"]
    shown = [n for n in range(3) if any(row[n] != "–" for row in rows)]
    rows = [[row[n] for n in shown] for row in rows]
    return table([columns[n] for n in shown], rows, "What the bound assumes")


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _mean_drift(run: Run) -> Markup | None:
    """Γ's mean from the first round on, which the queues keep below Γ max (C10)."""
    limit = option(run, "strategy.gamma_max")
    bound = float(limit) if isinstance(limit, int | float) else None
    known = [*drifts(run, bound)]
    sums = accumulate((row for _, row in known), _added)
    means = [
        (number, [total / count for total in row])
        for count, ((number, _), row) in enumerate(zip(known, sums, strict=True), 1)
    ]
    return _by_unit(run, "Drift Γ, mean of the rounds so far", "Γ", means, bound)


def drifts(run: Run, limit: float | None) -> Iterator[tuple[int, Sequence[float]]]:
    """Γ of each round, as planned; of units that failed, and of all in a skipped round, by what it
    did to the queue (eq. 29), of which an empty one tells the most that it can have been."""
    before: Sequence[float] = (0.0,) * run.num_units
    for line in run.rounds:
        gammas = line.plan.gammas
        if limit is not None and line.queues:
            told = [after - was + limit for after, was in zip(line.queues, before, strict=True)]
            pairs = enumerate(gammas or told)
            gammas = tuple(told[unit] if unit in line.failures else each for unit, each in pairs)
        before = line.queues or before
        if gammas:
            yield line.round, gammas


def _added(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _by_unit(
    run: Run,
    title: str,
    up: str,
    rows: Sequence[tuple[int, Sequence[float]]],
    limit: float | None = None,
) -> Markup | None:
    """A line a unit; of many units the most, the mean and the least."""
    known = [(float(number), row) for number, row in rows if row]
    if not known:
        return None
    if run.num_units <= _MOST_LINES:
        series = [
            Series(f"unit {unit}", unit, [(number, row[unit]) for number, row in known])
            for unit in range(run.num_units)
        ]
    else:
        series = spread(known, f" of {run.num_units} units")
    if limit is not None:
        ends = [(known[0][0], limit), (known[-1][0], limit)]
        series.append(Series(f"Γ max, {limit:g}", _LIMIT_STYLE, ends))
    return lines(title, "round", up, series, zero=True)


def spread(rows: Sequence[tuple[float, Sequence[float]]], of: str) -> list[Series]:
    """Most, mean and least of each round's values."""
    kinds: dict[str, Callable[[Sequence[float]], float]]
    kinds = {"most": max, "mean": lambda row: sum(row) / len(row), "least": min}
    return [
        Series(f"{name}{of}", style, [(number, pick(row)) for number, row in rows])
        for style, (name, pick) in enumerate(kinds.items())
    ]
