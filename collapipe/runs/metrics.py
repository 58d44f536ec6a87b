"""The schema of a run's metrics: what is written of a round, read again, and put into a table."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import AliasChoices, Field

from collapipe.plan import RoundPlan
from collapipe.report import ClusterCost, RoundCost, RoundReport
from collapipe.state import Estimates

Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Cell = str | int | float


def _named(name: str, before: str) -> Any:
    """The name of a field, and the one that older runs have."""
    return Field(validation_alias=AliasChoices(name, before))


@dataclass(frozen=True, slots=True)
class Metric:
    """The main metric of an evaluation, with its signature, and others."""

    name: str
    value: float
    signature: str = ""
    extra_metrics: Annotated[Mapping[str, float], _named("extra_metrics", "beside")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class RoundLine:
    """A line of ``metrics.jsonl``: a ``RoundReport``, and what the server measured beside it.

    Fields with a default are absent in older runs, or in rounds that were not evaluated.

    Attributes
    ----------
    seconds
        Measured wall time of each phase; names of the units' phases begin with ``unit/``.
    wall_s
        Measured from the run's start to the round's end.
    """

    round: int
    plan: RoundPlan
    units: tuple[int, ...]
    failures: dict[int, str]
    samples: Count
    bytes_up: Count
    bytes_down: Count
    seconds: Mapping[str, Amount]
    wall_s: Amount
    train_loss: float | None
    cost: RoundCost | None = None
    clock_s: Amount | None = None
    skipped: str | None = None
    excluded: Annotated[dict[int, str], _named("excluded", "set_aside")] = field(
        default_factory=dict
    )
    queues: tuple[float, ...] = ()
    estimates: Estimates | None = None
    target_tokens: Count = 0
    evaluation_loss: float | None = None
    metric: Metric | None = None

    @classmethod
    def of(cls, report: RoundReport, seconds: Mapping[str, float], wall_s: float) -> Self:
        """The line of a round; ``seconds`` are the server's own."""
        known = {each.name: getattr(report, each.name) for each in fields(report)}
        return cls(**(known | {"seconds": {**seconds, **report.seconds}, "wall_s": wall_s}))

    @property
    def costs(self) -> dict[int, ClusterCost]:
        """Modelled cost of each unit that the plan has."""
        return {each.unit: each for each in self.cost.clusters} if self.cost else {}

    @property
    def energy_j(self) -> float | None:
        """Modelled energy of all units, uploads and devices."""
        return None if self.cost is None else self.cost.energy_j

    @property
    def kept_queues(self) -> tuple[float, ...]:
        """``queues``, empty where the strategy keeps none."""
        return self.queues if self.plan.queues else ()

    def json_tree(self) -> dict[str, Any]:
        """What is written down; nothing of an evaluation that there was not."""
        tree = asdict(self)
        if self.plan.certificate is not None:
            tree["plan"]["certificate"]["gap"] = self.plan.certificate.gap
        absent = ("evaluation_loss", "metric") if self.metric is None else ()
        return {name: value for name, value in tree.items() if name not in absent}


def _listed(units: Iterable[object]) -> str:
    return " ".join(map(str, units))


_CELLS: dict[str, Callable[[RoundLine], Cell | None]] = {
    "round": lambda line: line.round,
    "train_loss": lambda line: line.train_loss,
    "evaluation_loss": lambda line: line.evaluation_loss,
    "metric_name": lambda line: line.metric.name if line.metric else None,
    "metric_value": lambda line: line.metric.value if line.metric else None,
    "samples": lambda line: line.samples,
    "target_tokens": lambda line: line.target_tokens,
    "clock_s": lambda line: line.clock_s,
    "delay_s": lambda line: line.cost.delay_s if line.cost else None,
    "bytes_up": lambda line: line.bytes_up,
    "bytes_down": lambda line: line.bytes_down,
    "scheduled_units": lambda line: _listed(cluster.unit for cluster in line.plan.clusters),
    "trained_units": lambda line: _listed(line.units),
    "failed_units": lambda line: _listed(line.failures),
    "excluded_units": lambda line: _listed(line.excluded),
    "skipped": lambda line: line.skipped,
    "upload_energy_j": lambda line: math.fsum(c.upload_energy_j for c in line.costs.values()),
    "device_energy_j": lambda line: math.fsum(
        joules for cost in line.costs.values() for joules in cost.device_energy_j.values()
    ),
    "longest_queue": lambda line: max(line.kept_queues, default=None),
    "mean_queue": lambda line: fmean(line.kept_queues) if line.kept_queues else None,
    "plan_s": lambda line: line.seconds.get("plan"),
    "train_s": lambda line: line.seconds.get("train"),
    "aggregate_s": lambda line: line.seconds.get("aggregate"),
    "round_s": lambda line: line.seconds.get("round"),
    "evaluate_s": lambda line: line.seconds.get("evaluate"),
    "wall_s": lambda line: line.wall_s,
}
COLUMNS = tuple(_CELLS)
"""The header of ``metrics.csv``: the same for every run, so that tables can be put together."""


def csv_row(line: RoundLine) -> dict[str, Cell]:
    """A cell for each of ``COLUMNS``; empty where the round has no such figure.

    Units are numbers with spaces in between. ``delay_s`` and energies are modelled; ``plan_s`` …
    ``evaluate_s`` and ``wall_s`` are measured, ``clock_s`` is what the run's clock is.
    """
    found = {name: cell(line) for name, cell in _CELLS.items()}
    return {name: "" if value is None else value for name, value in found.items()}
