"""What happened in a round: a unit's report, and the line that the server writes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from collapipe.plan import Amount, RoundPlan
from collapipe.rounding import RoundingErrors
from collapipe.state import Estimates

PIPELINE = "pipeline"  # the phase of real devices: batches through all segments
START = "start"  # the phase from a unit's taking the message to its first micro-batch
_MOST_DEVICES, _MOST_EVENTS = 1000, 100
TRACED_STEPS = 100  # of a round, its first
_Sentence = Annotated[str, Field(max_length=600)]
_Times = tuple[float, float, float, float]
Count = Annotated[int, Field(ge=0)]


def _named(name: str, before: str) -> Any:
    """The name of a field, and the one that older runs have."""
    return Field(validation_alias=AliasChoices(name, before))


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value, what it takes to compute it again, and other metrics' values beside it."""

    name: str
    value: float
    signature: str = ""
    extra_metrics: Annotated[Mapping[str, float], _named("extra_metrics", "beside")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a device measured of a unit's round, by its own clock.

    ``compute_s`` are seconds of its forwards and backwards, ``wait_s`` those until what they need
    had come, ``send_s`` those from an action's end until what it made had left, beside others,
    ``span_s`` from each step's first to its last. ``chunk_s`` is the median over steps of
    what a micro-batch took, forward and backward. ``sent_bytes`` went to neighbours, those of the
    control unit among them; ``peak_bytes`` is the most memory that the process ever had.
    """

    name: Annotated[str, Field(max_length=64)]
    blocks: Count
    chunk_s: Amount
    compute_s: Amount
    wait_s: Amount
    send_s: Amount
    span_s: Amount
    sent_bytes: Amount
    peak_bytes: Amount


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """When a device did what in a round, in seconds of its control unit's clock from the round's
    first step on.

    ``steps`` has a row for each action of each step, in their order: when the device asked for what
    the action needs, when that was there, when it was done, and when what it made had left.
    ``error_s`` is how far the two
    clocks may be apart from what was taken for it.
    """

    name: Annotated[str, Field(max_length=64)]
    error_s: Amount
    steps: Annotated[
        tuple[Annotated[tuple[_Times, ...], Field(max_length=10_000)], ...],
        Field(max_length=TRACED_STEPS),
    ]


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One unit's round.

    ``losses`` of each local step are sums over target tokens divided by the tokens of the whole
    batch; ``squared_norms`` of each are ‖∇F‖² before clipping. ``seconds`` are wall time per phase
    of the control unit's thread. Bytes are the decoder link's payload: activations with masks and
    targets up, gradients down. ``stem_rows`` are those that a frozen stem computed, by the run's
    own account. ``rounding`` is what the unit measured of precisions that the scheduler chooses.
    ``devices`` are those that were there at the round's end, where they are real, and
    ``events`` say in a sentence each what happened to them.
    """

    unit: int
    losses: tuple[float, ...]
    samples: int
    target_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    link_bytes_up: int = 0
    link_bytes_down: int = 0
    squared_norms: tuple[float, ...] = ()
    stem_rows: int = 0
    rounding: RoundingErrors = field(default_factory=RoundingErrors)
    devices: Annotated[tuple[DeviceReport, ...], Field(max_length=_MOST_DEVICES)] = ()
    events: Annotated[tuple[_Sentence, ...], Field(max_length=_MOST_EVENTS)] = ()
    traces: Annotated[tuple[DeviceTrace, ...], Field(max_length=_MOST_DEVICES)] = ()


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """What all local steps of a unit's round and its upload cost in the world that the scheduler
    sees.

    ``upload_s`` is τ_n^Up (eq. 11), None where the strategy planned no channel; ``device_energy_j``
    (eq. 16) has each device that takes part and has an energy law. ``finish_s`` is when both are
    done, earlier than their sum where they take place side by side; older runs have the sum only.
    ``stem_s`` goes before all of it: a frozen stem computes the rows that are not kept.
    """

    unit: int
    pipeline_s: Amount
    upload_s: Amount | None
    upload_energy_j: Amount
    device_energy_j: dict[str, Amount]
    finish_s: Amount | None = None
    stem_s: Amount = 0.0

    @property
    def ends_s(self) -> float:
        """``finish_s``, in older runs the sum of both; behind the stem's seconds."""
        both_s = self.pipeline_s + (self.upload_s or 0.0)
        return self.stem_s + (both_s if self.finish_s is None else self.finish_s)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round costs: ``delay_s`` is when its slowest unit is done."""

    delay_s: float
    clusters: tuple[ClusterCost, ...]

    @property
    def energy_j(self) -> float:
        """Of all units, uploads and devices."""
        return math.fsum(
            each.upload_energy_j + math.fsum(each.device_energy_j.values())
            for each in self.clusters
        )


@dataclass(frozen=True, slots=True)
class UnitsEvaluation:
    """What units found on their own rows.

    ``loss`` and ``metric`` are those of all their rows together, None where nobody told anything.
    ``rows`` are how many each unit that told has; 0: it has none, and adds nothing. ``failures``
    are the causes of those that are left out. ``bytes_down`` of weights were sent for it.
    """

    rows: Mapping[int, Count]
    failures: Mapping[int, str]
    loss: float | None = None
    metric: Score | None = None
    bytes_down: Count = 0


@dataclass(frozen=True, slots=True)
class RoundTraces:
    """A line of ``traces.jsonl.gz``: the devices' traces by their units."""

    round: int
    units: Mapping[int, tuple[DeviceTrace, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round as the server saw it; a line of ``metrics.jsonl``. Nobody trained by default, and
    older runs lack some of the fields.

    ``skipped`` is the cause of a round that came to nothing: its ``plan`` has no clusters, all
    of its units failed, or too few were left for a masked sum.
    ``failures`` are the causes of units that were scheduled and did not finish, ``excluded`` of
    those that could not be planned with. Bytes up are activations of all local steps plus the
    upload, bytes down gradients plus the download. ``seconds`` are measured for each phase, names
    of the units' phases begin with ``unit/``; ``wall_s`` from the run's start to the round's end.
    ``clock_s`` is of all rounds so far, modelled or, with ``clock: real``, as measured; ``cost`` is
    always modelled. ``checkpoint_bytes`` of the bytes up were units' states for a checkpoint, which
    took ``checkpoint_s`` of the modelled clock. ``train_loss`` is the mean over the units' steps,
    weighted as the aggregation weighs the units. ``queues`` are Y_n(t+1) of all N units, which
    waited on if they failed, and ``error_queues`` Q_n(t+1), to which these add nothing; empty
    without a scheduler's. ``devices``
    and ``events`` are those of each unit whose devices are real, ``pipeline_s`` what its batches
    took there, measured; ``traces`` of their devices.
    ``rounding`` is what units measured of precisions that the scheduler chooses.
    ``epsilon`` is ε of all rounds so far, at ``privacy.delta``, None without noise. ``estimates``
    are those after this round. ``evaluation_loss`` and ``metric`` are the server's, those of
    ``on_units`` where only units evaluate.
    """

    round: int
    plan: RoundPlan
    units: tuple[int, ...] = ()
    failures: dict[int, str] = field(default_factory=dict)
    samples: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    checkpoint_bytes: Count = 0
    checkpoint_s: Amount = 0.0
    seconds: Mapping[str, Amount] = field(default_factory=dict)
    wall_s: Amount = 0.0
    train_loss: float | None = None
    cost: RoundCost | None = None
    clock_s: Amount | None = None
    skipped: str | None = None
    excluded: Annotated[dict[int, str], _named("excluded", "set_aside")] = field(
        default_factory=dict
    )
    queues: tuple[float, ...] = ()
    estimates: Estimates = field(default_factory=Estimates)
    target_tokens: Count = 0
    evaluation_loss: float | None = None
    metric: Score | None = None
    on_units: UnitsEvaluation | None = None
    error_queues: tuple[float, ...] = ()
    pipeline_s: Mapping[int, Amount] = field(default_factory=dict)
    devices: Mapping[int, tuple[DeviceReport, ...]] = field(default_factory=dict)
    events: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    traces: Mapping[int, tuple[DeviceTrace, ...]] = field(default_factory=dict)
    epsilon: float | None = None
    rounding: Mapping[int, RoundingErrors] = field(default_factory=dict)

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
        """What is written down, but for traces, which have a file of their own; nothing of an
        evaluation that there was not."""
        tree = asdict(self)
        if self.plan.certificate is not None:
            tree["plan"]["certificate"]["gap"] = self.plan.certificate.gap
        absent = {"traces", *(("evaluation_loss", "metric") if self.metric is None else ())}
        absent |= {name for name in ("on_units", "epsilon") if tree[name] is None}
        absent |= {"rounding"} if not self.rounding else set()
        absent |= {"checkpoint_bytes", "checkpoint_s"} if not self.checkpoint_bytes else set()
        return {name: value for name, value in tree.items() if name not in absent}
