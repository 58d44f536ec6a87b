"""Problems and solutions of the planner: the interfaces of all solvers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError, unit_called
from collapipe.plan import Certificate
from collapipe.state import Channel, DeviceProfile, HeadPlace, Payload, Uplink

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Latency = Literal["bound", "flow_shop", "overlap"]
LATENCIES = get_args(Latency)
FADINGS = ("none", "rayleigh")
UPLINKS = ("streamed", "after")
ENERGIES = ("all", "adapters")
_LEAST_BUDGET = 1e-18  # of an error: its inverse is squared


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{option}={value}: must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """Sub-1: which blocks on which device, S and m, for the smallest pipeline latency.

    ``activation_s``, ``head_s`` and ``gradient_s`` are of a whole batch; each takes an m-th of it
    for a micro-batch. Which partition is fastest depends on how long the activations take, which is
    decided later: several times are asked for. If the last one is infinite, they are all from the
    one before it on.
    """

    devices: tuple[DeviceProfile, ...]  # K of them
    num_blocks: int  # L
    batch_size: int  # b; a micro-batch has b̂ = b/m samples, a real number here (eq. 5)
    max_micro_batches: int
    latency: Latency  # the law of the pipeline's time, see ``optim.latency``
    activation_s: tuple[float, ...] = (0.0,)  # on the uplink while the pipeline runs, ascending
    head_s: float = 0.0  # in the head, behind the uplink if there is one
    gradient_s: float = 0.0  # the gradients' way down, behind the head
    min_micro_batches: int = 1  # as many as at most: a round goes on with its m


@dataclass(frozen=True, slots=True)
class Partition:
    """A point of a cluster's front.

    ``latency_s`` is Σ + (m - 1)·M with Σ the sum of all stages and M the slowest one. It excludes
    the uplink, which is a separate stage: see ``optim.latency.streamed_s``. ``replicated`` means
    that every device holds the whole encoder and trains b/K samples (VanillaFL, S = 1).
    ``over_limits`` means that memory and energy limits were ignored. ``head`` is the place of the
    head that the times assume; only payloads for this place are compatible.
    """

    blocks: tuple[int, ...]  # δ_k for each of the K devices, 0 for those left out
    num_micro_batches: int  # m
    latency_s: float  # of one batch, under the problem's law
    slowest_s: float = 0.0  # M, of a micro-batch; 0: what is uploaded waits for the whole batch
    replicated: bool = False
    over_limits: bool = False
    fastest_s: tuple[float, float] = (0.0, math.inf)  # another is faster for all times outside
    head: HeadPlace | None = None  # None: it stands where the configuration says

    @property
    def num_segments(self) -> int:
        """S, the devices that hold at least one block."""
        return 1 if self.replicated else len(self.blocks) - self.blocks.count(0)


@dataclass(frozen=True, slots=True)
class ClusterSolution:
    """A solver's answer to a ``ClusterProblem``.

    For each number of segments S, ascending, the front holds the partitions with S segments that
    are fastest among all with at most S, ordered by the uplink times for which they are fastest.
    Partitions with more segments than the fastest one are dominated, because the drift Γ grows with
    S. Heuristics return a single point. The certificate refers to ``best`` at its uplink time. If
    not ``complete``, a time limit ended the search and the front may lack points or hold slower
    ones.
    """

    front: tuple[Partition, ...]
    best: Partition  # the fastest for the least time on the uplink
    certificate: Certificate
    complete: bool = True


ClusterSolver = Callable[[ClusterProblem, np.random.Generator], ClusterSolution]
"""Raises ``InfeasibleRoundError`` where the caps cannot hold the model. The exact ones and most
heuristics draw nothing from the generator."""


@dataclass(frozen=True)
class RoundOptions:
    """What a round minimises: V·makespan plus the drift of the queues.

    Drift ``gamma`` is Σ Y_n·Γ_n over all units, ``paper`` (eq. 32) is Σ Y_n·(S_n + p_n) over the
    scheduled ones, under which a longer queue makes selection less likely. Under fading
    ``rayleigh`` rates are expectations over a gain that is exponentially distributed. Uplink
    ``streamed``: each micro-batch is uploaded as it leaves the last segment; ``after``: once the
    batch has passed the pipeline, as eq. 26 adds them up. Energy ``all``: E^max pays for all that a
    unit sends; ``adapters``: for the model's update alone, as C8 is printed.
    """

    drift: str = "gamma"
    drift_weight: float = 0.1  # V, 1/s; above 0 with drift ``paper``
    kappa: float = 1.0  # κ = βη²/(2N) of Γ (eq. 28)
    gradient_bound: float = 0.1  # φ²
    interference_constant_w: float = 0.08  # C
    gamma_max: float = 0.84  # Γ^max of the queues (eq. 29)
    error_budget: float = 1e-3  # ρ̄, the mean over rounds of what rounding does to the gradient
    hard_gamma: bool = False  # C11: also Γ_n ≤ Γ^max of each scheduled unit in every round
    fading: str = "none"
    uplink: str = "streamed"
    energy: str = "all"

    def __post_init__(self) -> None:
        check_choice("drift", self.drift, ("gamma", "paper"))
        check_choice("fading", self.fading, FADINGS)
        check_choice("uplink", self.uplink, UPLINKS)
        check_choice("energy", self.energy, ENERGIES)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}={value}: must be finite and not negative")
        if self.error_budget < _LEAST_BUDGET:
            raise ConfigError(
                f"error_budget={self.error_budget:g}: must be at least {_LEAST_BUDGET:g}; for no "
                "error at all set compression to float32"
            )
        if self.drift == "paper" and not self.drift_weight:
            raise ConfigError(
                "drift_weight=0: drift paper needs more than 0, for else no upload takes too long "
                "and no power is low enough; raise it or choose drift gamma"
            )


@dataclass(frozen=True, slots=True)
class RoundProblem:
    """The joint problem of a round of N units, given each cluster's front.

    Times cover all local steps of the round. With ``error_queues`` a unit's ρ adds to the drift;
    without them ρ is at most ρ̄ in each round.
    """

    fronts: tuple[tuple[Partition, ...], ...]  # empty: cannot hold the model this round
    uplinks: tuple[Uplink, ...]
    channels: tuple[Channel, ...]  # J of them, each for one unit
    queues: tuple[float, ...]  # Y_n(t)
    num_blocks: int  # L, for Γ
    options: RoundOptions
    error_queues: tuple[float, ...] = ()  # Q_n(t)
    names: tuple[str, ...] = ()  # of the units in messages to users; may be empty

    def called(self, unit: int) -> str:
        """A unit in a message to users."""
        return self.names[unit] if self.names else unit_called(unit)

    @property
    def largest_error(self) -> float:
        """The most that a unit's ρ may be in this round."""
        return math.inf if self.error_queues else self.options.error_budget


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduled unit gets: ``unit`` is its place among the problem's N."""

    unit: int
    channel: int
    power_w: float
    upload_s: float  # of sending, τ_n^Up (eq. 11), whether or not the pipeline runs meanwhile
    finish_s: float  # from the round's begin to the end of the upload
    partition: Partition
    payload: Payload | None = None  # one of its uplink's, where that has any

    @property
    def gradient_error(self) -> float:
        """ρ, the relative rounding error of the payload."""
        return self.payload.gradient_error if self.payload else 0.0


@dataclass(frozen=True, slots=True)
class RoundSolution:
    """A solver's answer to a ``RoundProblem``; ``allocations`` in the units' order."""

    allocations: tuple[Allocation, ...]
    certificate: Certificate


RoundSolver = Callable[[RoundProblem], RoundSolution]
"""Raises ``InfeasibleRoundError`` where no unit can be scheduled."""
