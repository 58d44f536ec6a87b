"""The schema of a run's metrics: what is written of a round, read again, and put into a table."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
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


_SECONDS = ("plan", "train", "aggregate", "round", "evaluate")
COLUMNS = (
    "round",
    "train_loss",
    "evaluation_loss",
    "metric_name",
    "metric_value",
    "samples",
    "target_tokens",
    "clock_s",
    "delay_s",
    "bytes_up",
    "bytes_down",
    "scheduled_units",
    "trained_units",
    "failed_units",
    "excluded_units",
    "skipped",
    "upload_energy_j",
    "device_energy_j",
    "longest_queue",
    "mean_queue",
    *(f"{phase}_s" for phase in _SECONDS),
    "wall_s",
)
"""The header of ``metrics.csv``: the same for every run, so that tables can be put together."""


def csv_row(line: RoundLine) -> dict[str, Cell]:
    """A cell for each of ``COLUMNS``; empty where the round has no such figure.

    Units are numbers with spaces in between. ``delay_s`` and energies are modelled; ``plan_s`` …
    ``evaluate_s`` and ``wall_s`` are measured, ``clock_s`` is what the run's clock is.
    """
    plan, costs, queues = line.plan, line.costs.values(), line.kept_queues
    own = {name: getattr(line, name) for name in COLUMNS if name in RoundLine.__slots__}
    others: dict[str, Cell | None] = {
        "metric_name": line.metric.name if line.metric else None,
        "metric_value": line.metric.value if line.metric else None,
        "delay_s": line.cost.delay_s if line.cost else None,
        "scheduled_units": _listed(cluster.unit for cluster in plan.clusters),
        "trained_units": _listed(line.units),
        "failed_units": _listed(line.failures),
        "excluded_units": _listed(line.excluded),
        "upload_energy_j": math.fsum(cost.upload_energy_j for cost in costs),
        "device_energy_j": math.fsum(
            joules for cost in costs for joules in cost.device_energy_j.values()
        ),
        "longest_queue": max(queues, default=None),
        "mean_queue": math.fsum(queues) / len(queues) if queues else None,
        **{f"{phase}_s": line.seconds.get(phase) for phase in _SECONDS},
    }
    row = {name: {**own, **others}[name] for name in COLUMNS}
    return {name: "" if value is None else value for name, value in row.items()}


def _listed(units: Iterable[object]) -> str:
    return " ".join(map(str, units))
