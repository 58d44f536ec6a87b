"""The seam of a strategy. A user's own is a frozen dataclass with ``plan_round``, named by
``strategy._target_``; its fields are the options under ``strategy``."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from collapipe.plan import RoundPlan
from collapipe.state import Channel, ClusterState, DeviceProfile, Estimates


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """What a round is planned from.

    ``clusters`` are all N, in the units' order. Who is away or unknown has devices that hold no
    block (``max_blocks=0``) and sits out.
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
    losses: tuple[float | None, ...]  # mean of each cluster's last round; None before its first
    partition: str | None = None  # the framework's cluster solver; None: the strategy's own
    learning_rate: float = 0.0  # η of the round's first local step
    estimates: Estimates = field(default_factory=Estimates)  # of β, φ² and ξ, from training
    error_queues: tuple[float, ...] = ()  # Q_n(t), as the last round's plan left them


def present_devices(cluster: ClusterState) -> tuple[DeviceProfile, ...]:
    """Those that can hold a block: neither away nor without memory for one."""
    return tuple(device for device in cluster.devices if device.max_blocks != 0)


class Planner(Protocol):
    """Decides who takes part, who holds which blocks, and how many micro-batches.

    Attributes that a class may have: ``latency``, the law of the pipelines' time that it plans by
    (else ``overlap``), ``fading``, of the uplinks' rates (else ``none``), and ``uplink``, whether
    uploads take place beside the pipelines (else ``streamed``). A round's cost is computed by them.
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """The same request and generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
