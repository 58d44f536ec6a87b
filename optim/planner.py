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

    Attributes
    ----------
    clusters
        All N clusters, in the units' order. Who is away or unknown has devices that hold no block
        (``max_blocks=0``) and sits out.
    num_blocks
        L.
    batch_size, local_steps
        b, and how many batches a round has.
    num_segments
        S; the most of it where the strategy chooses S by itself. None: one a device.
    num_micro_batches
        m; the most of it where the strategy chooses m by itself.
    schedule
        Of the pipelines.
    channels
        J uplink channels.
    queues
        Y_n(t) of each cluster, as the last round's plan left them.
    losses
        Mean training loss of each cluster's last round; None before its first.
    partition
        Name of the cluster solver that the framework prescribes; None: the strategy's own.
    learning_rate
        η of the round's first local step.
    estimates
        What training has shown of β, φ² and ξ.
    """

    round: int
    clusters: tuple[ClusterState, ...]
    num_blocks: int
    batch_size: int
    local_steps: int
    num_segments: int | None
    num_micro_batches: int
    schedule: str
    channels: tuple[Channel, ...]
    queues: tuple[float, ...]
    losses: tuple[float | None, ...]
    partition: str | None = None
    learning_rate: float = 0.0
    estimates: Estimates = field(default_factory=Estimates)


def present_devices(cluster: ClusterState) -> tuple[DeviceProfile, ...]:
    """Those that can hold a block: neither away nor without memory for one."""
    return tuple(device for device in cluster.devices if device.max_blocks != 0)


class Planner(Protocol):
    """Decides who takes part, who holds which blocks, and how many micro-batches.

    Attributes that a class may have: ``latency``, the law of the pipelines' time that it plans by
    (else ``overlap``), and ``fading``, of the uplinks' rates (else ``none``). A round's cost is
    computed by them.
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """The same request and generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
