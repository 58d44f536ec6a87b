"""Learning curves of runs: losses and metrics over rounds and over modelled seconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from collapipe.errors import ConfigError
from collapipe.report import Score
from collapipe.runs.evidence import Interval
from collapipe.runs.reading import Run
from optim.problem import Floats
from reproduction.drawing import over_places
from reproduction.figure import Cell, Row

SHARES = ("accuracy", "strict F1")  # of 1; here in %
_AXES = ("round", "devices_s", "clock_s")
COLUMNS = ("seed", *_AXES, "train_loss", "validation_loss", "metric", "validation_metric")
BASIS = "learning is real, measured on held-out rows"
K = TypeVar("K", bound=tuple[Cell, ...])


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """A run's curves; metrics are BLEU or percentages, over rounds (from 1) or seconds."""

    metric: str
    rounds: Floats
    devices_s: Floats  # modelled, until a round's end, on the slowest cluster's devices alone
    clock_s: Floats  # the same with uploads
    losses: Floats  # in training
    validation: Floats  # NaN in rounds without evaluation
    validation_losses: Floats
    test: float  # of the model at its end
    test_loss: float

    @property
    def unit(self) -> str:
        """Unit of the metric; BLEU has no unit."""
        return "%" if self.metric in SHARES else ""

    @property
    def metric_label(self) -> str:
        """The metric with its unit."""
        return f"{self.metric}{self.unit and f' [{self.unit}]'}"

    def points(self, what: str, axis: str) -> tuple[Floats, Floats]:
        """Return the places on ``axis`` where ``what`` was measured, and its values."""
        values: Floats = getattr(self, what)
        there = ~np.isnan(values)
        return getattr(self, axis)[there], values[there]

    def at(self, what: str, axis: str, place: float) -> float:
        """Return ``what`` at a ``place`` on ``axis``, interpolated linearly."""
        return float(np.interp(place, *self.points(what, axis)))

    def end(self, axis: str) -> float:
        """Return the last place on ``axis``."""
        return float(getattr(self, axis)[-1])

    def rows(self) -> Iterator[Row]:
        """Yield its cells under ``COLUMNS`` without the seed; empty if it was not evaluated."""
        trained = self.rounds, self.devices_s, self.clock_s, self.losses
        table = np.column_stack((*trained, self.validation_losses, self.validation))
        for number, *values in table.tolist():
            *train, loss, metric = ("" if np.isnan(value) else value for value in values)
            yield int(number), *train, loss, self.metric, metric


def mean_over_seeds(
    curves: Sequence[LearningCurve], what: str, axis: str = "rounds", unit: float = 1.0
) -> tuple[list[float], list[Interval]]:
    """Return mean places on ``axis`` in ``unit``, and mean values, of runs with equal rounds."""
    places, values = zip(*(each.points(what, axis) for each in curves), strict=True)
    return (np.mean(places, axis=0) / unit).tolist(), over_places(values)


def curves(runs: Mapping[K, Run]) -> dict[K, LearningCurve]:
    """Return the curve of each run. Raises as ``learning_curve``."""
    return {key: learning_curve(run) for key, run in runs.items()}


def rows(seed: int, curves: Mapping[K, LearningCurve]) -> Iterator[Row]:
    """Yield rows: the seed, each key's cells, and the cells under ``COLUMNS``."""
    return ((*key, seed, *row) for key, curve in curves.items() for row in curve.rows())


def learning_curve(run: Run) -> LearningCurve:
    """Return the curve of a completed run.

    Raises ``ConfigError`` if a unit was excluded or failed in a round, because runs that trained on
    different rows cannot be compared.
    """
    summary, lines = run.summary, run.rounds
    if summary is None or summary.metric is None or summary.test_loss is None:
        raise ConfigError(f"{run.folder}: has no test metric; remove it, so that it is run again")
    few = [line.round for line in lines if len(line.units) < run.num_units]
    if few:
        raise ConfigError(
            f"{run.folder}: {len(few)} rounds, the first of them {few[0]}, without all units"
        )
    pipelines_s = [[cost.pipeline_s for cost in line.costs.values()] for line in lines]
    losses = [line.evaluation_loss or 0.0 if line.metric else None for line in lines]
    return LearningCurve(
        summary.metric.name,
        np.array([line.round for line in lines], float),
        np.cumsum([max(each, default=0.0) for each in pipelines_s]),
        np.array([line.clock_s for line in lines]),
        np.array([line.train_loss for line in lines], float),
        np.array([line.metric and _value(line.metric) for line in lines], float),
        np.array(losses, float),
        _value(summary.metric),
        summary.test_loss,
    )


def _value(metric: Score) -> float:
    return metric.value * (100 if metric.name in SHARES else 1)
