"""The seam of a strategy. A user's own is a frozen dataclass with ``plan_round``, named by
``strategy._target_``; its fields are the options under ``strategy``."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collapipe.plan import RoundPlan
from collapipe.state import Channel, ClusterState


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """What a round is planned from.

    Attributes
    ----------
    clusters
        The N clusters that can be reached, in the units' order.
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


class Planner(Protocol):
    """Decides who takes part, who holds which blocks, and how many micro-batches."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """The same request and generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
