"""The interface of a scheduling strategy.

A user's strategy is a frozen dataclass with ``plan_round``, named by ``strategy._target_``; its
fields are the options ``strategy.*``.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from collapipe.plan import RoundPlan
from collapipe.state import Channel, ClusterState, DeviceProfile, Estimates


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The input of a round's plan.

    ``clusters`` are all N clusters in the units' order. A cluster that is away or unknown has
    devices that hold no block (``max_blocks=0``) and is not scheduled. With
    ``privacy.noise_multiplier`` all ``losses`` and ``estimates`` are None, since a plan must not
    depend on rows.
    """

    round: int
    clusters: tuple[ClusterState, ...]
    num_blocks: int  # L
    batch_size: int  # b
    local_steps: int  # batches a round
    num_segments: int | None  # S; where the strategy chooses S, the most of it. None: one a device
    num_micro_batches: int  # m; where the strategy chooses m, the most of it
    schedule: str  # of the pipelines
    channels: tuple[Channel, ...]  # J uplink channels
    queues: tuple[float, ...]  # Y_n(t), as the last round's plan left them
    losses: tuple[float | None, ...]  # mean of each cluster's last round; None: unknown
    partition: str | None = None  # the framework's cluster solver; None: the strategy's own
    learning_rate: float = 0.0  # η of the round's first local step
    estimates: Estimates = field(default_factory=Estimates)  # of β, φ² and ξ, from training
    error_queues: tuple[float, ...] = ()  # Q_n(t), as the last round's plan left them


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
        """Return the plan of a round; the same request and generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
