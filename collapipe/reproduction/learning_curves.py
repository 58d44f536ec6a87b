"""What a run learned: losses and metrics over rounds and over its modelled seconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError
from collapipe.report import Score
from collapipe.reproduction.drawing import over_places
from collapipe.reproduction.figure import Cell, Row
from collapipe.runs.evidence import Interval
from collapipe.runs.reading import Run

Floats = NDArray[np.float64]
SHARES = ("accuracy", "strict F1")  # of 1; here in %
_AXES = ("round", "devices_s", "clock_s")
COLUMNS = ("seed", *_AXES, "train_loss", "validation_loss", "metric", "validation_metric")


@dataclass(frozen=True, slots=True)
class Points:
    """A quantity where it was measured; all arrays have as many elements.

    Attributes
    ----------
    rounds
        From 1.
    devices_s, clock_s
        Modelled seconds until the round's end: on the slowest cluster's devices alone, and with
        uploads.
    """

    rounds: Floats
    devices_s: Floats
    clock_s: Floats
    values: Floats

    def at(self, axis: str, place: float) -> float:
        """The value where ``axis``, one of the three, is at ``place``; between points linear."""
        return float(np.interp(place, getattr(self, axis), self.values))

    def end(self, axis: str) -> float:
        """The last place on ``axis``."""
        return float(getattr(self, axis)[-1])


def mean_over_seeds(
    several: Sequence[Points], axis: str = "rounds", unit: float = 1.0
) -> tuple[list[float], list[Interval]]:
    """Mean places on ``axis`` in ``unit``, and values; of runs with the same rounds."""
    places = np.mean([getattr(each, axis) for each in several], axis=0) / unit
    return places.tolist(), over_places([each.values for each in several])


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """A run; metrics are BLEU, or a share in %.

    Attributes
    ----------
    losses
        In training, of every round.
    validation, validation_losses
        Where it was evaluated.
    test, test_loss
        Of the model at its end.
    """

    metric: str
    losses: Points
    validation: Points
    validation_losses: Points
    test: float
    test_loss: float

    @property
    def unit(self) -> str:
        """Of the metric; BLEU has none."""
        return "%" if self.metric in SHARES else ""

    @property
    def metric_label(self) -> str:
        """The metric with its unit."""
        return f"{self.metric}{self.unit and f' [{self.unit}]'}"

    def rows(self) -> Iterator[Row]:
        """Its cells under ``COLUMNS``, but for the seed; empty where it was not evaluated."""
        losses, metrics = (
            dict(zip(each.rounds, each.values.tolist(), strict=True))
            for each in (self.validation_losses, self.validation)
        )
        every = self.losses
        columns = (every.rounds, every.devices_s, every.clock_s, every.values)
        for number, *values in zip(*(each.tolist() for each in columns), strict=True):
            loss, metric = losses.get(number, ""), metrics.get(number, "")
            yield int(number), *values, loss, self.metric, metric


K = TypeVar("K", bound=tuple[Cell, ...])


def learning_curves(runs: Mapping[K, Run]) -> dict[K, LearningCurve]:
    """The curve of each run of a seed."""
    return {key: learning_curve(run) for key, run in runs.items()}


def curve_rows(seeds: Mapping[int, Mapping[K, LearningCurve]]) -> Iterator[Row]:
    """Rows of all curves: the cells of the key, then ``COLUMNS``."""
    for seed, curves in seeds.items():
        for key, curve in curves.items():
            for row in curve.rows():
                yield *key, seed, *row


def learning_curve(run: Run) -> LearningCurve:
    """The curve of a run that completed.

    Raises ``ConfigError`` where a unit was excluded or failed in a round: runs that trained on
    other rows cannot be compared.
    """
    summary = run.summary
    if summary is None or summary.metric is None or summary.test_loss is None:
        raise ConfigError(f"{run.folder}: has no test metric; remove it, so that it is run again")
    few = [line.round for line in run.rounds if len(line.units) < run.num_units]
    if few:
        raise ConfigError(
            f"{run.folder}: {len(few)} rounds, the first of them {few[0]}, without all units"
        )
    pipelines_s = [
        max((cost.pipeline_s for cost in line.costs.values()), default=0.0) for line in run.rounds
    ]
    rounds = np.array([line.round for line in run.rounds], float)
    axes = rounds, np.cumsum(pipelines_s), np.array(run.clock.ends_s)
    evaluated = [place for place, line in enumerate(run.rounds) if line.metric is not None]
    there = axes[0][evaluated], axes[1][evaluated], axes[2][evaluated]
    metrics = [_value(metric) for line in run.rounds if (metric := line.metric)]
    losses = [line.evaluation_loss or 0.0 for line in run.rounds if line.metric]
    return LearningCurve(
        summary.metric.name,
        Points(*axes, np.array([line.train_loss for line in run.rounds], float)),
        Points(*there, np.array(metrics)),
        Points(*there, np.array(losses)),
        _value(summary.metric),
        summary.test_loss,
    )


def _value(metric: Score) -> float:
    return metric.value * (100 if metric.name in SHARES else 1)
