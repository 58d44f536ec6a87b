"""Rounds and units, and how the server averages their updates."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.sections.numbers import Count, CountFrom0, NotNegative, Positive, Share

_MONTH_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class FederationSettings:
    """Rounds, units, and the aggregation of their weights."""

    rounds: Count
    num_units: Count
    min_units: Count | None
    wait_s: NotNegative
    miss_limit: Count
    local_steps: Count
    eval_every: Count
    round_timeout_s: Annotated[float, Field(gt=0, le=_MONTH_S)]
    weighting: Literal["tokens", "uniform"]
    on_infeasible: Literal["stop", "skip"]
    clock: Literal["modelled", "real"]
    checkpoint_every: CountFrom0
    keep: Count
    channel_noise: NotNegative
    max_update_norm: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    max_share: Annotated[float, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.min_units is not None and self.min_units > self.num_units:
            raise ConfigError(
                f"federation.min_units={self.min_units}: more than federation.num_units="
                f"{self.num_units}, which is how many there may be; lower it"
            )

    @property
    def total_steps(self) -> int:
        """Number of global steps of the whole run."""
        return self.rounds * self.local_steps

    def steps_of(self, round_: int) -> range:
        """Return the global steps of a round; rounds count from 1, steps from 0."""
        return range((round_ - 1) * self.local_steps, round_ * self.local_steps)


@dataclass(frozen=True)
class ServerOptimizerSettings:
    """How the server averages updates, and its step with the pseudo-gradient θ(t) − Σ wₙ θₙ.

    ``median`` and ``trimmed_mean`` apply to each weight separately and weigh all units equally.
    ``trim`` is the fraction of units that a trimmed mean leaves out at each end.
    """

    name: Literal["fedavg", "sgd", "momentum", "adam"]
    lr: Positive
    momentum: Share
    beta2: Share
    eps: Positive
    average: Literal["mean", "median", "trimmed_mean"]
    trim: Annotated[float, Field(ge=0, lt=0.5)]
