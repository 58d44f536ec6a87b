"""The seam of a strategy. A user's own is a frozen dataclass with ``plan_round``, named by
``strategy._target_``; its fields are the options under ``strategy``."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collapipe.plan import RoundPlan
from collapipe.state import ClusterState


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """What a round is planned from.

    Attributes
    ----------
    clusters
        The N clusters that can be reached, in the units' order.
    num_blocks
        L.
    num_segments
        S of every cluster, where the strategy does not choose it; None: one a device.
    num_micro_batches, schedule
        m and the schedule, where the strategy does not choose them.
    """

    round: int
    clusters: tuple[ClusterState, ...]
    num_blocks: int
    num_segments: int | None
    num_micro_batches: int
    schedule: str


class Planner(Protocol):
    """Decides who takes part, who holds which blocks, and how many micro-batches."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """The same request and generator give the same plan.

        Raises ``InfeasibleRoundError`` with the numbers and what would make it feasible.
        """
