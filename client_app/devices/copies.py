"""Choose how many steps lie between two copies of real devices' blocks."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.plan import ClusterPlan

_SHARE = 0.03  # of a step's time that copies may take
_MOST = 20  # steps that a loss repeats; the control unit keeps their activations in memory


@dataclass(frozen=True, slots=True)
class Sending:
    """A device's hops in a step: their bytes, and their ``share`` of the step's time, measured in
    an earlier round; sends that overlap can exceed 1. Without a measurement the share is 1."""

    num_bytes: float
    share: float = 1.0


def copied_bytes(plan: ClusterPlan, block_bytes: float) -> dict[str, float]:
    """Return the bytes that each device sends in a copy: those of the blocks that it leads."""
    leaders = Counter(name for segment in plan.segments for name in segment.leaders)
    return {name: block_bytes * number for name, number in leaders.items()}


def copy_interval(
    copy_bytes: Mapping[str, float], sending: Mapping[str, Sending], storing: float = 0.0
) -> int:
    """Return the least number of steps r for which copies take at most 3 % of the time.

    ``copy_bytes`` has the bytes c of a copy by device. A device sends its hops' h bytes in a share
    s ≤ 1 of the step, so it sends a copy in about s · c / h steps. The control unit checks and
    stores a copy in ``storing`` steps, as measured in an earlier round. So
    r = ⌈max(storing, s · c / h) / 0.03⌉ over the devices, between 1 and 20.
    """
    each = ((c, sending[name]) for name, c in copy_bytes.items())
    steps = max(min(1.0, of.share) * c / max(1.0, of.num_bytes) for c, of in each)
    return max(1, math.ceil(min(_MOST, max(steps, storing) / _SHARE)))
