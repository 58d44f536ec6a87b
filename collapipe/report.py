"""Reports about a round: a unit's report with measured errors, and the line of the server."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from collapipe.plan import Amount, RoundPlan
from collapipe.state import Estimates, Precision

PIPELINE = "pipeline"  # the phase of real devices: batches through all segments
# the phase from a unit's receipt of the message to its first micro-batch, and the time in which
# devices wait for weights
START = "start"
_MOST_DEVICES, _MOST_EVENTS = 1000, 100
TRACED_STEPS = 100  # the first steps of a round
_Sentence = Annotated[str, Field(max_length=600)]
Count = Annotated[int, Field(ge=0)]
# Figures of units. Larger ones would make the run's files unreadable for all.
_Figure = Annotated[float, Field(ge=0, lt=1e18)]
_Time = Annotated[float, Field(gt=-1e18, lt=1e18)]
_Times = tuple[_Time, _Time, _Time, _Time]


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """Relative rounding errors of the gradient by precision, ρ = E‖Δg‖²/φ².

    They are of rounded activations and uploads; absent precisions were not measured.
    """

    activation: Mapping[Precision, _Figure] = field(default_factory=dict)
    upload: Mapping[Precision, _Figure] = field(default_factory=dict)

    def updated(self, measured: "RoundingErrors") -> "RoundingErrors":
        """Replace values by newer measurements; float32 stays exact, whatever a unit reports."""
        exact: dict[Precision, float] = {"float32": 0.0}
        return RoundingErrors(
            {**self.activation, **measured.activation, **exact},
            {**self.upload, **measured.upload, **exact},
        )


# Used before a unit has measured any: the largest values of benchmarks/gradient_error.py.
BENCHMARKED = RoundingErrors(
    {"float32": 0.0, "bfloat16": 4.4e-6, "int8": 2.1e-5, "int6": 3.0e-4, "int4": 5.3e-3},
    {"float32": 0.0, "bfloat16": 3.4e-6, "int8": 3.5e-5, "int6": 5.8e-4, "int4": 1.1e-2},
)


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value, the signature to compute it again, and values of further metrics."""

    name: str
    value: FiniteFloat
    signature: str = ""
    extra_metrics: Mapping[str, FiniteFloat] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's measurements of a unit's round, in seconds of the device's clock.

    ``compute_s`` is the time of forward and backward passes, and ``wait_s`` the time that they
    waited for inputs. ``send_s`` is the time from the end of an action until its output was sent,
    which may overlap with other actions; ``send_alone_s`` is the part that overlaps with no action
    and no waiting. ``span_s`` sums the times from a step's first action to its last. ``chunk_s`` is
    the median time per step of a micro-batch, forward and backward. ``sent_bytes`` counts bytes to
    neighbours, including the control unit. ``peak_bytes`` is the process's highest memory use so
    far. ``control_unit_wait_s`` is the part of ``wait_s`` for tensors from the control unit, or
    while its embedding or head computes.
    """

    name: Annotated[str, Field(max_length=64)]
    blocks: Annotated[int, Field(ge=0, lt=2**31)]
    chunk_s: _Figure
    compute_s: _Figure
    wait_s: _Figure
    send_s: _Figure
    span_s: _Figure
    sent_bytes: _Figure
    peak_bytes: _Figure
    control_unit_wait_s: _Figure = 0.0
    send_alone_s: _Figure = 0.0


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """A stage's timed actions in a round, in seconds since the round's first step.

    The stage is a device's segment, or the control unit's embedding or head. An answer of the head
    begins when it is submitted, or when the one before has come.
    Times are on the control unit's clock; ``error_s`` bounds the error of the conversion. Each step
    has a row per action, in order. A row has four times: the device requests the action's input, it
    has the input, it has finished the action, and it has sent the output.
    """

    name: Annotated[str, Field(max_length=64)]
    error_s: _Figure
    steps: Annotated[
        tuple[Annotated[tuple[_Times, ...], Field(max_length=10_000)], ...],
        Field(max_length=TRACED_STEPS),
    ]
    stage: Literal["segment", "embedding", "head"] = "segment"


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One unit's report about a round.

    ``losses`` has each local step's mean loss per target token, and ``squared_norms`` each step's
    ‖∇F‖² before clipping. ``seconds`` maps phases of the control unit's thread to wall time. Bytes
    are the decoder link's payload: activations with masks and targets up, gradients down.
    ``stem_rows`` is the number of rows that a frozen stem computed, as counted within the run.
    ``rounding`` has measured errors of precisions that the scheduler chooses.

    ``devices`` has reports of the real devices at the round's end. ``events`` describes what
    happened to devices, one sentence each.
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
    input_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """Modelled cost of all local steps of a unit's round and of its upload.

    ``upload_s`` is τ_n^Up (eq. 11); None if the strategy planned no channel. ``device_energy_j``
    (eq. 16) covers each participating device with an energy law. ``finish_s`` is the time at which
    pipeline and upload are done; it is less than their sum if they overlap.
    ``stem_s`` is the time before that, in which a frozen stem computes rows without a cached
    activation. ``spread`` is the standard deviation of the logarithm of measured to modelled
    pipeline time, from earlier rounds on real devices; 0 if none were measured.
    """

    unit: int
    pipeline_s: Amount
    upload_s: Amount | None
    upload_energy_j: Amount
    device_energy_j: dict[str, Amount]
    finish_s: Amount
    stem_s: Amount = 0.0
    spread: Amount = 0.0

    @property
    def ends_s(self) -> float:
        """``stem_s`` plus ``finish_s``."""
        return self.stem_s + self.finish_s


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Modelled cost of a round; ``delay_s`` is the time until its slowest unit is done."""

    delay_s: float
    clusters: tuple[ClusterCost, ...]


@dataclass(frozen=True, slots=True)
class UnitsEvaluation:
    """Evaluation of a model by units, on their own rows.

    ``loss`` and ``metric`` are over all rows together; None if no unit reported any. ``rows`` maps
    units that replied to their numbers of rows, which may be 0. ``failures`` maps other units to
    causes. ``bytes_down`` is the size of the weights that were sent for the evaluation.
    """

    rows: Mapping[int, Count]
    failures: Mapping[int, str]
    loss: float | None = None
    metric: Score | None = None
    bytes_down: Count = 0


@dataclass(frozen=True, slots=True)
class RoundTraces:
    """A line of ``traces.jsonl.gz``: the devices' traces by unit."""

    round: int
    units: Mapping[int, tuple[DeviceTrace, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """The server's report about a round; a line of ``metrics.jsonl``.

    ``skipped`` is the reason why a round had no result: its ``plan`` has no clusters, all units
    failed, or too few were left for a masked sum. ``failures`` has the causes of scheduled units
    that did not finish, and ``excluded`` the causes of units that could not be planned.

    ``bytes_up`` counts activations of all local steps and uploads, and ``bytes_down`` gradients and
    downloads. ``checkpoint_bytes`` is the part of ``bytes_up`` for units' states in a checkpoint,
    which took ``checkpoint_s`` of the modelled clock.

    ``seconds`` has the measured time of each phase; names of units' phases begin with ``unit/``.
    ``wall_s`` is the time from the run's start to the round's end. ``clock_s`` is the time of all
    rounds so far, modelled or, with ``clock: real``, measured; ``cost`` is always modelled.

    ``train_loss`` is the mean over the units' steps, weighted as in the aggregation. ``queues`` are
    Y_n(t+1) of all N units; failed units count as not scheduled. ``error_queues`` are Q_n(t+1), to
    which failed units add nothing. Both are empty if the strategy keeps no queues. ``estimates``
    are as of this round's end.

    ``devices``, ``events`` and ``traces`` are by unit, for units with real devices. ``pipeline_s``
    is the measured time of their batches. ``rounding`` has units' measured errors of precisions
    that the scheduler chooses. ``epsilon`` is ε of all rounds so far at ``privacy.delta``; None
    without noise. ``evaluation_loss`` and ``metric`` come from the server, or from ``on_units`` if
    only units evaluate.
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
    cost: RoundCost
    clock_s: Amount
    skipped: str | None
    excluded: dict[int, str]
    queues: tuple[float, ...]
    estimates: Estimates
    target_tokens: Count = 0
    input_tokens: Count = 0
    evaluation_loss: float | None = None
    metric: Score | None = None
    on_units: UnitsEvaluation | None = None
    error_queues: tuple[float, ...]
    pipeline_s: Mapping[int, Amount] = field(default_factory=dict)
    devices: Mapping[int, tuple[DeviceReport, ...]] = field(default_factory=dict)
    events: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    traces: Mapping[int, tuple[DeviceTrace, ...]] = field(default_factory=dict)
    epsilon: float | None = None
    rounding: Mapping[int, RoundingErrors] = field(default_factory=dict)

    @property
    def costs(self) -> dict[int, ClusterCost]:
        """Modelled cost of each unit in the plan."""
        return {each.unit: each for each in self.cost.clusters}

    @property
    def energy_j(self) -> float:
        """Modelled energy of all units, uploads and devices."""
        return math.fsum(
            each.upload_energy_j + math.fsum(each.device_energy_j.values())
            for each in self.cost.clusters
        )

    @property
    def kept_queues(self) -> tuple[float, ...]:
        """``queues``; empty if the strategy keeps no queues."""
        return self.queues if self.plan.queues else ()

    def json_tree(self) -> dict[str, Any]:
        """Return the line's content as a tree.

        Traces are left out, because they have a separate file, and so are fields without a value.
        """
        tree = asdict(self)
        if self.plan.certificate is not None:
            tree["plan"]["certificate"]["gap"] = self.plan.certificate.gap
        absent = {"traces", *(("evaluation_loss", "metric") if self.metric is None else ())}
        absent |= {name for name in ("on_units", "epsilon") if tree[name] is None}
        absent |= {"rounding"} if not self.rounding else set()
        absent |= {"checkpoint_bytes", "checkpoint_s"} if not self.checkpoint_bytes else set()
        return {name: value for name, value in tree.items() if name not in absent}
