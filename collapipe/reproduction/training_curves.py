"""What a run learned: losses and metrics over rounds and over the seconds of its world."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError
from collapipe.report import ClusterCost
from collapipe.runs.evidence import Cell
from collapipe.runs.metrics import Metric
from collapipe.runs.reading import Run

Floats = NDArray[np.float64]
SHARES = ("accuracy", "strict F1")  # of 1; here in %
COLUMNS = (
    "round",
    "devices_s",
    "clock_s",
    "train_loss",
    "validation_loss",
    "metric",
    "validation_metric",
)


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

    @classmethod
    def mean(cls, several: Sequence[Self]) -> Self:
        """Point by point, of runs with the same rounds."""
        names = ("rounds", "devices_s", "clock_s", "values")
        return cls(*(np.mean([getattr(each, name) for each in several], axis=0) for name in names))


@dataclass(frozen=True, slots=True)
class Curve:
    """A run; metrics are BLEU, or a share in %.

    Attributes
    ----------
    losses
        In training, of every round.
    validation, validation_losses
        Where it was evaluated.
    test, test_loss
        Of the model at its end.
    wall_s
        That it took, measured.
    """

    metric: str
    losses: Points
    validation: Points
    validation_losses: Points
    test: float
    test_loss: float
    wall_s: float

    @property
    def unit(self) -> str:
        """Of the metric; BLEU has none."""
        return "%" if self.metric in SHARES else ""


def curve(run: Run) -> Curve:
    """Of a run that completed. Raises ``ConfigError`` where a unit sat out or failed in a round:
    runs that trained on other rows cannot be compared."""
    summary = run.summary
    if summary is None or summary.metric is None or summary.test_loss is None:
        raise ConfigError(f"{run.folder}: has no test metric; remove it, so that it is run again")
    few = [line.round for line in run.rounds if len(line.units) < run.num_units]
    if few:
        raise ConfigError(
            f"{run.folder}: {len(few)} rounds, the first of them {few[0]}, without all units"
        )
    every = Points(
        np.array([line.round for line in run.rounds], float),
        np.cumsum([_on_devices(line.costs.values()) for line in run.rounds]),
        np.array(run.clock.ends_s),
        np.array([line.train_loss for line in run.rounds], float),
    )
    evaluated = [place for place, line in enumerate(run.rounds) if line.metric is not None]
    metrics = [_value(metric) for line in run.rounds if (metric := line.metric)]
    beside = [line.evaluation_loss or 0.0 for line in run.rounds if line.metric]
    return Curve(
        summary.metric.name,
        every,
        _some(every, evaluated, metrics),
        _some(every, evaluated, beside),
        _value(summary.metric),
        summary.test_loss,
        summary.wall_s or 0.0,
    )


def rows(curve: Curve) -> list[tuple[Cell, ...]]:
    """A row for each round under ``COLUMNS``; empty cells where it was not evaluated."""
    validation, losses = curve.validation, curve.validation_losses.values
    measured = dict[float, tuple[float, float]](
        zip(validation.rounds, zip(losses, validation.values, strict=True), strict=True)
    )
    every, found = curve.losses, list[tuple[Cell, ...]]()
    columns = (every.rounds, every.devices_s, every.clock_s, every.values)
    for number, *values in zip(*(each.tolist() for each in columns), strict=True):
        loss, metric = measured.get(number, ("", ""))
        found.append((int(number), *values, loss, curve.metric, metric))
    return found


def _some(every: Points, places: Sequence[int], values: Sequence[float]) -> Points:
    """Other values, at some of the rounds."""
    return Points(
        every.rounds[places], every.devices_s[places], every.clock_s[places], np.array(values)
    )


def _on_devices(costs: Iterable[ClusterCost]) -> float:
    return max((cost.pipeline_s for cost in costs), default=0.0)


def _value(metric: Metric) -> float:
    return metric.value * (100 if metric.name in SHARES else 1)
