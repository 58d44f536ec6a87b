"""Virtual queues, drift, and what the convergence bound assumes."""

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from collapipe.run_report.html import Markup, charts, join, note, table
from collapipe.run_report.lines import Series, lines
from collapipe.runs.reading import Run

_MOST_LINES, _NAMED, _LIMIT_STYLE = 4, 2, 13
_ASSUMED = {
    "φ², bound of ‖∇F‖²": "gradient_bound",
    "β, smoothness": "smoothness",
    "ξ, curvature": "curvature",
    "κ = βη²/(2N)": "kappa",
    "C, W": "interference_constant_w",
    "Γ max": "gamma_max",
    "V, 1/s": "drift_weight",
}
_Rows = Sequence[tuple[float, Sequence[float]]]  # round, a value of each unit


def queues(run: Run) -> Markup:
    """Queues Y and drift Γ of each round."""
    if not run.keeps_queues:
        return join(note("The strategy keeps no queues."), _assumptions(run))
    after = [(float(line.round), line.queues) for line in run.rounds if line.queues]
    limit = run.option("strategy.gamma_max")
    bound = float(limit) if isinstance(limit, int | float) else None
    return join(
        charts(
            _by_unit("Virtual queues Y after each round", "Y", after),
            _by_unit("Drift Γ, mean of the rounds so far", "Γ", _mean_drift(run, bound), bound),
        ),
        note(f"Units shown by name have the largest means of all {run.num_units}.")
        if run.num_units > _MOST_LINES
        else None,
        _assumptions(run),
    )


def _assumptions(run: Run) -> Markup | None:
    """What the bound assumes: as training showed it, and as the strategy has it."""
    estimates = next((e for line in reversed(run.rounds) if (e := line.estimates)), None)
    known = [
        [name, _figure(getattr(estimates, field, None)), _figure(run.option(f"strategy.{field}"))]
        for name, field in _ASSUMED.items()
    ]
    rows = [row for row in known if row[1:] != ["–", "–"]]
    if not rows:
        return None
    columns = ["what the bound assumes", "estimated from training", "set for the strategy"]
    shown = [n for n in range(3) if any(row[n] != "–" for row in rows)]
    cells = [[row[n] for n in shown] for row in rows]
    return table([columns[n] for n in shown], cells, "What the bound assumes")


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _mean_drift(run: Run, limit: float | None) -> _Rows:
    """Γ's mean from the first round on, which the queues keep below Γ max (C10)."""
    known = dict(drifts(run, limit))
    if not known:
        return []
    means = np.cumsum([*known.values()], axis=0) / np.arange(1, len(known) + 1)[:, None]
    return [*zip(map(float, known), means.tolist(), strict=True)]


def drifts(run: Run, limit: float | None) -> Iterator[tuple[int, Sequence[float]]]:
    """Γ of each round, as planned. Of units that failed, and of all in a skipped round, it is
    computed from the change of the queue (eq. 29): where that is empty, the most that Γ can be."""
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


def _by_unit(title: str, up: str, known: _Rows, limit: float | None = None) -> Markup | None:
    """A line for each of a few units; of more a band, the median, and the worst by their names."""
    if not known:
        return None
    num_units = len(known[0][1])
    means = [statistics.fmean(row[unit] for _, row in known) for unit in range(num_units)]
    worst = sorted(range(num_units), key=lambda unit: -means[unit])[:_NAMED]
    drawn = range(num_units) if num_units <= _MOST_LINES else worst
    series = [
        Series(f"unit {unit}", style, [(number, row[unit]) for number, row in known])
        for style, unit in enumerate(drawn, num_units > _MOST_LINES)
    ]
    if num_units > _MOST_LINES:
        series.insert(0, spread(known))
    if limit is not None:
        ends = [(known[0][0], limit), (known[-1][0], limit)]
        series.append(Series(f"Γ max, {limit:g}", _LIMIT_STYLE, ends))
    return lines(title, "round", up, series, zero=True)


def spread(known: _Rows) -> Series:
    """The median of the units in each round, in a band from the least to the most."""
    medians = [(number, statistics.median(row)) for number, row in known]
    band = [(number, min(row), max(row)) for number, row in known]
    return Series("median of the units, least to most", 0, medians, band=band)
