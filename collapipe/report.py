"""What happened in a round: a unit's report, and the line that the server writes."""

import math
from dataclasses import dataclass, field

from collapipe.plan import RoundPlan
from collapipe.state import Estimates


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One unit's round.

    Attributes
    ----------
    losses
        Loss of each local step: sum over target tokens divided by the tokens of the whole batch.
    samples, target_tokens
        Trained on in this round, all local steps together.
    seconds
        Wall time per phase of the control unit's thread, in seconds.
    link_bytes_up, link_bytes_down
        Payload of the decoder link: activations with masks and targets up, gradients down.
    squared_norms
        ‖∇F‖² of each local step, before clipping.
    """

    unit: int
    losses: tuple[float, ...]
    samples: int
    target_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    link_bytes_up: int = 0
    link_bytes_down: int = 0
    squared_norms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """What a unit's round costs in the world that the scheduler sees.

    Attributes
    ----------
    pipeline_s
        Of all local steps.
    upload_s
        τ_n^Up (eq. 11); None: the strategy planned no channel.
    upload_energy_j
        p·τ^Up, of everything that is sent.
    device_energy_j
        Of all local steps (eq. 16), for each device with an energy law that takes part.
    """

    unit: int
    pipeline_s: float
    upload_s: float | None
    upload_energy_j: float
    device_energy_j: dict[str, float]


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round costs: ``delay_s`` is its slowest unit's pipeline and upload."""

    delay_s: float
    clusters: tuple[ClusterCost, ...]

    @property
    def energy_j(self) -> float:
        """Of all units, uploads and devices."""
        return math.fsum(
            each.upload_energy_j + math.fsum(each.device_energy_j.values())
            for each in self.clusters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round as the server saw it; a line of ``metrics.jsonl``. Nobody trained by default.

    Attributes
    ----------
    plan
        What was decided: who, which blocks, channels and powers; Γ and the queues. Without clusters
        where the round was skipped.
    cost
        Modelled, whatever clock the run has.
    clock_s
        All rounds until the end of this one, modelled or, with ``clock: real``, as measured.
    skipped
        Why nobody took part; None: somebody did.
    excluded
        Why units could not be planned with, by unit.
    queues
        Y_n(t+1) of all N units, which waited on if they failed; empty without a scheduler's.
    train_loss
        Mean over the units' steps, weighted as the aggregation weighs the units; None where nothing
        was trained.
    failures
        Cause of each unit that was scheduled and did not finish.
    estimates
        After this round.
    bytes_up, bytes_down
        Activations of all local steps plus the upload; gradients plus the download.
    """

    round: int
    plan: RoundPlan
    cost: RoundCost
    clock_s: float
    skipped: str | None
    excluded: dict[int, str]
    queues: tuple[float, ...]
    units: tuple[int, ...] = ()
    failures: dict[int, str] = field(default_factory=dict)
    train_loss: float | None = None
    estimates: Estimates
    samples: int = 0
    target_tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
