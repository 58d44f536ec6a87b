"""The interface of a scheduling strategy.

A user's strategy is a frozen dataclass with ``plan_round``, named by ``strategy._target_``; its
fields are the options ``strategy.*``.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import Channel, ClusterState, DeviceProfile, Estimates, check_each, check_sizes

_SIZES = "num_blocks", "batch_size", "local_steps", "num_segments", "num_micro_batches"


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The input of a round's plan.

    ``clusters`` are all N clusters in the units' order. A cluster that is absent or unknown has
    devices that hold no block (``max_blocks=0``) and is not scheduled. With
    ``privacy.noise_multiplier`` all ``losses`` and ``estimates`` are None, because a plan must not
    depend on rows.
    """

    round: int
    clusters: tuple[ClusterState, ...]
    num_blocks: int  # L
    batch_size: int  # b
    local_steps: int  # batches per round
    num_segments: int | None  # S, or its maximum if the strategy chooses S; None: one per device
    num_micro_batches: int  # m, or its maximum if the strategy chooses m
    schedule: str  # of the pipelines; ``auto``: the fastest one for each cluster
    channels: tuple[Channel, ...]  # J uplink channels
    queues: tuple[float, ...]  # Y_n(t) after the last round
    losses: tuple[float | None, ...]  # mean loss of each cluster's last round; None if unknown
    partition: str | None = None  # the framework's cluster solver; None: the strategy's
    learning_rate: float = 0.0  # η of the round's first local step
    estimates: Estimates = field(default_factory=Estimates)  # β, φ² and ξ, estimated in training
    error_queues: tuple[float, ...] = ()  # Q_n(t) after the last round
    # earlier plans of real devices, whose micro-batches and shares stay if devices can hold them
    kept: tuple[ClusterPlan, ...] = ()

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _SIZES}
        check_sizes(**{name: size for name, size in sizes.items() if size is not None})
        check_each("clusters", self.clusters, ClusterState)
        check_each("channels", self.channels, Channel)
        expected = len(self.channels)
        for each in self.clusters if expected else ():  # without channels no uplink is planned
            if each.uplink and (gains := len(each.uplink.gains)) != expected:
                raise ConfigError(
                    f"{each.called}: {gains} gains, expected {expected}, one for each channel; "
                    "uplink=None if they are not known"
                )

    def kept_by(self, unit: int) -> ClusterPlan | None:
        """Return the unit's plan whose micro-batches and shares stay; None if it has none."""
        return next((plan for plan in self.kept if plan.unit == unit), None)


def present_devices(cluster: ClusterState) -> tuple[DeviceProfile, ...]:
    """Return the devices that can hold a block: present, with memory for at least one."""
    return tuple(device for device in cluster.devices if device.max_blocks != 0)


class Planner(Protocol):
    """Decides which units take part, which device holds which blocks, and the micro-batches.

    A class may define three attributes, which also govern the computed cost of a round:
    ``latency``, the law of pipeline time (default ``overlap``); ``fading`` of the uplink rates
    (default ``none``); and ``uplink``, whether uploads overlap with the pipeline (default
    ``streamed``).
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """Return the plan of a round, and leave the request as it is; the same request and
        generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
