"""The pairs of devices that exchange tensors, and the names of each as the other's neighbour."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from collapipe.plan import ClusterPlan
from collapipe.row_shares import connected
from pipeline.devices.messages import BEFORE, BEHIND, SHARE, neighbour_name


@dataclass(frozen=True, slots=True)
class Pair:
    """Two devices, and their names as each other's neighbours; the first one dials."""

    first: str
    name_of_second: str
    second: str
    name_of_first: str


def pairs(plan: ClusterPlan) -> Iterator[Pair]:
    """Yield each two devices that exchange tensors."""
    for segment in plan.segments:
        for (a, first), (b, second) in combinations(enumerate(segment.devices), 2):
            yield Pair(first, neighbour_name(SHARE, b), second, neighbour_name(SHARE, a))
    for before, after in pairwise(plan.segments):
        for a, b in connected(before.parts, after.parts):
            ends = before.devices[a], after.devices[b]
            yield Pair(ends[0], neighbour_name(BEHIND, b), ends[1], neighbour_name(BEFORE, a))


def dialled_by(device: str, plan: ClusterPlan, relay: bool) -> list[Pair]:
    """Return the pairs of which the device dials the second one: none if hops are relayed."""
    return [] if relay else [each for each in pairs(plan) if each.first == device]
