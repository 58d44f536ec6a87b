"""The joint problem of a round, its options, and the answers of its solvers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real

from collapipe.errors import ConfigError, unit_called
from collapipe.plan import Certificate
from collapipe.state import MOST, Channel, Payload, Uplink
from optim.problem import Partition, check_choice

CHOICES = {
    "drift": ("gamma", "paper"),
    "fading": ("none", "rayleigh"),
    "uplink": ("streamed", "after"),
    "energy": ("all", "adapters"),
    "segment_price": ("paper", "none"),
}
_LEAST_BUDGET = 1e-18  # least error budget; its inverse is squared and must be finite


@dataclass(frozen=True)
class RoundOptions:
    """A round's objective, V·makespan plus the drift of the queues, and its options.

    Drift ``gamma`` is Σ Y_n·Γ_n over all units. Drift ``paper`` (eq. 32) is Σ Y_n·(S_n + p_n) over
    the scheduled units, so a longer queue makes selection less likely.

    With fading ``rayleigh`` rates are expectations over an exponentially distributed gain.

    With uplink ``streamed`` each micro-batch is uploaded when it leaves the last segment. With
    ``after`` uploads begin when the batch has passed the pipeline, as in eq. 26.

    With energy ``all`` E^max covers everything that a unit sends. With ``adapters`` it covers only
    the model's update, as printed in C8.

    With segment price ``paper`` Γ has the term κ·φ²·S²/L of eq. 28, with ``none`` it has not. Drift
    ``paper`` charges S in any case.
    """

    drift: str = "gamma"
    drift_weight: float = 0.1  # V, 1/s; positive with drift ``paper``
    kappa: float = 1.0  # κ = βη²/(2N) of Γ (eq. 28)
    gradient_bound: float = 0.1  # φ²
    interference_constant_w: float = 0.08  # C
    gamma_max: float = 0.84  # Γ^max of the queues (eq. 29)
    error_budget: float = 1e-3  # ρ̄, bound of the mean over rounds of the rounding errors ρ
    hard_gamma: bool = False  # C11: also require Γ_n ≤ Γ^max of each scheduled unit per round
    fading: str = "none"
    uplink: str = "streamed"
    energy: str = "all"
    segment_price: str = "none"

    @property
    def prices_segments(self) -> bool:
        """Whether the objective depends on S."""
        return self.drift == "paper" or self.segment_price == "paper"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for field in fields(self):
            value, numeric = getattr(self, field.name), isinstance(field.default, float | int)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name}={value!r}: must be true or false")
            if numeric and not (isinstance(value, Real) and 0 <= float(value) <= MOST):
                raise ConfigError(f"{field.name}={value!r}: must be a number from 0 to {MOST:g}")
        if self.error_budget < _LEAST_BUDGET:
            raise ConfigError(
                f"error_budget={self.error_budget:g}: must be at least {_LEAST_BUDGET:g}; for no "
                "error at all set compression to float32"
            )
        if self.drift == "paper" and not self.drift_weight:
            raise ConfigError(
                "drift_weight=0: drift paper needs a positive value, as otherwise the upload time "
                "does not count; raise it or choose drift gamma"
            )


@dataclass(frozen=True, slots=True)
class RoundProblem:
    """The joint problem of a round of N units, given each cluster's front.

    Times cover all local steps of the round. With ``error_queues`` a unit's ρ adds to the drift;
    without them ρ is at most ρ̄ in each round.
    """

    fronts: tuple[tuple[Partition, ...], ...]  # empty if the unit cannot hold the model
    uplinks: tuple[Uplink, ...]
    channels: tuple[Channel, ...]  # J of them, each for one unit
    queues: tuple[float, ...]  # Y_n(t)
    num_blocks: int  # L, for Γ
    options: RoundOptions
    error_queues: tuple[float, ...] = ()  # Q_n(t)
    names: tuple[str, ...] = ()  # of the units in messages to users; may be empty

    def called(self, unit: int) -> str:
        """Return the unit's name or number for messages to users."""
        return self.names[unit] if self.names else unit_called(unit)

    @property
    def largest_error(self) -> float:
        """The upper bound of a unit's ρ in this round."""
        return math.inf if self.error_queues else self.options.error_budget


@dataclass(frozen=True, slots=True)
class Allocation:
    """The channel, power, partition and payload of a scheduled unit; ``unit`` is its index among
    the problem's N units."""

    unit: int
    channel: int
    power_w: float
    upload_s: float  # τ_n^Up (eq. 11), including time that overlaps with the pipeline
    finish_s: float  # from the beginning of the round to the end of the upload
    partition: Partition
    payload: Payload | None = None  # one of its uplink's payloads, if it has any

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
"""Solves the joint round. Raises ``InfeasibleRoundError`` if no unit can be scheduled."""
