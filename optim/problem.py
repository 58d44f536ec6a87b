"""What a planner is asked, and what it answers: the seams of every solver."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError
from collapipe.plan import Certificate
from collapipe.state import Channel, DeviceProfile, Uplink

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Latency = Literal["bound", "flow_shop", "overlap"]
LATENCIES = get_args(Latency)


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{option}={value}: must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """Sub-1: which blocks on which device, S and m, for the smallest pipeline latency."""

    devices: tuple[DeviceProfile, ...]  # K of them
    num_blocks: int  # L
    batch_size: int  # b; a micro-batch has b̂ = b/m samples, a real number here (eq. 5)
    max_micro_batches: int
    latency: Latency  # the law of the pipeline's time, see ``optim.latency``


@dataclass(frozen=True, slots=True)
class Partition:
    """A point of a cluster's Pareto front.

    ``replicated``: every device holds the whole encoder and trains b/K samples (VanillaFL): no
    pipeline, S = 1. ``over_limits``: found as if memory and energy were unlimited.
    """

    blocks: tuple[int, ...]  # δ_k for each of the K devices, 0 for those left out
    num_micro_batches: int  # m
    latency_s: float  # of one batch, under the problem's law
    replicated: bool = False
    over_limits: bool = False

    @property
    def num_segments(self) -> int:
        """S, the devices that hold at least one block."""
        return 1 if self.replicated else len(self.blocks) - self.blocks.count(0)


@dataclass(frozen=True, slots=True)
class ClusterSolution:
    """A solver's answer to a ``ClusterProblem``.

    In the front S ascends and the latency strictly descends: an S above the fastest one's is
    dominated, since the drift Γ grows with S. Heuristics answer with a single point. The
    certificate is of the last point, the fastest. Not ``complete``: a time limit ended the search,
    so the front may lack points or hold slower ones.
    """

    front: tuple[Partition, ...]
    certificate: Certificate
    complete: bool = True

    @property
    def best(self) -> Partition:
        """The fastest point."""
        return self.front[-1]


ClusterSolver = Callable[[ClusterProblem, np.random.Generator], ClusterSolution]
"""Raises ``InfeasibleRoundError`` where the caps cannot hold the model. The exact ones and most
heuristics draw nothing from the generator."""


@dataclass(frozen=True)
class RoundOptions:
    """What a round minimises: V·makespan plus the drift of the queues.

    Drift ``gamma`` is Σ Y_n·Γ_n over all units, ``paper`` (eq. 32) is Σ Y_n·(S_n + p_n) over the
    scheduled ones, under which a longer queue makes selection less likely. Under fading
    ``rayleigh`` rates are expectations over a gain that is exponentially distributed.
    """

    drift: str = "gamma"
    drift_weight: float = 0.1  # V, 1/s; above 0 with drift ``paper``
    kappa: float = 1.0  # κ = βη²/(2N) of Γ (eq. 28)
    gradient_bound: float = 0.1  # φ²
    interference_constant_w: float = 0.08  # C
    gamma_max: float = 0.84  # Γ^max of the queues (eq. 29)
    hard_gamma: bool = False  # C11: also Γ_n ≤ Γ^max of each scheduled unit in every round
    fading: str = "none"

    def __post_init__(self) -> None:
        check_choice("drift", self.drift, ("gamma", "paper"))
        check_choice("fading", self.fading, ("none", "rayleigh"))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}={value}: must be finite and not negative")
        if self.drift == "paper" and not self.drift_weight:
            raise ConfigError(
                "drift_weight=0: drift paper needs more than 0, for else no upload takes too long "
                "and no power is low enough; raise it or choose drift gamma"
            )


@dataclass(frozen=True, slots=True)
class RoundProblem:
    """The joint problem of a round of N units, once each cluster's front is known."""

    fronts: tuple[tuple[Partition, ...], ...]  # empty: cannot hold the model this round
    uplinks: tuple[Uplink, ...]
    channels: tuple[Channel, ...]  # J of them, each for one unit
    queues: tuple[float, ...]  # Y_n(t)
    num_blocks: int  # L, for Γ
    options: RoundOptions


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduled unit gets: ``unit`` is its place among the problem's N."""

    unit: int
    channel: int
    power_w: float
    upload_s: float
    partition: Partition


@dataclass(frozen=True, slots=True)
class RoundSolution:
    """A solver's answer to a ``RoundProblem``; ``allocations`` in the units' order."""

    allocations: tuple[Allocation, ...]
    certificate: Certificate


RoundSolver = Callable[[RoundProblem], RoundSolution]
"""Raises ``InfeasibleRoundError`` where no unit can be scheduled."""
