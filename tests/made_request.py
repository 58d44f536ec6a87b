"""A strategy's request, with the usual values of what a test does not name."""

from collections.abc import Sequence
from typing import Any

from collapipe.state import ClusterState
from optim.planner import RoundRequest


def request_for(
    clusters: Sequence[ClusterState],
    num_blocks: int,
    batch_size: int,
    num_micro_batches: int,
    schedule: str = "one_f_one_b",
    **changes: Any,
) -> RoundRequest:
    """Return a request of round 1: one local step, no channels, empty queues, unknown losses."""
    usual: dict[str, Any] = {
        "round": 1,
        "local_steps": 1,
        "num_segments": None,
        "channels": (),
        "queues": (0.0,) * len(clusters),
        "losses": (None,) * len(clusters),
    }
    return RoundRequest(
        clusters=tuple(clusters),
        num_blocks=num_blocks,
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        **usual | changes,
    )
