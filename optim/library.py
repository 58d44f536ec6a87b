"""Plan a single round from Python, outside of a run."""

from collections.abc import Sequence

import numpy as np

from collapipe.plan import RoundPlan
from collapipe.state import Channel, ClusterState
from optim.dssra import Dssra
from optim.planner import Planner, RoundRequest
from optim.verify import verify_plan


def plan_round(
    clusters: Sequence[ClusterState],
    channels: Sequence[Channel],
    *,
    num_blocks: int,
    batch_size: int,
    strategy: Planner | None = None,
    queues: Sequence[float] = (),
    local_steps: int = 1,
    schedule: str = "one_f_one_b",
    seed: int = 0,
) -> RoundPlan:
    """Plan one round: participants, channels, powers, and the blocks of each device.

    ``strategy`` defaults to ``Dssra()``; its ``plan_round`` gets the whole request, for round 1.
    ``queues`` are Y_n of each cluster from the previous plan; empty means zeros.

    Raises ``InfeasibleRoundError`` with the numbers and what would make the round feasible, and
    ``PlanViolationError`` if the strategy's plan violates a constraint.
    """
    request = RoundRequest(
        round=1,
        clusters=tuple(clusters),
        num_blocks=num_blocks,
        batch_size=batch_size,
        local_steps=local_steps,
        num_segments=None,
        num_micro_batches=batch_size,
        schedule=schedule,
        channels=tuple(channels),
        queues=tuple(queues) or (0.0,) * len(clusters),
        losses=(None,) * len(clusters),
    )
    plan = (strategy or Dssra()).plan_round(request, np.random.default_rng(seed))
    verify_plan(plan, request)
    return plan
