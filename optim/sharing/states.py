"""Sets of a cluster's devices as numbers; devices that are alike are interchangeable.

A state counts the devices of each kind. With K different devices there are 2^K states; with few
kinds there are far fewer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from collapipe.state import DeviceProfile
from optim.problem import Bools, ClusterProblem, Ints


@dataclass(frozen=True, slots=True)
class States:
    """All sets of devices of some kinds, and the groups that can be taken out of each.

    The number of a set minus that of a group in it is the number of the remaining set. A pair is a
    set and a group in it. If groups have no order, the group has a device of the set's first kind,
    so that every way to cut a set into groups is counted once.

    If devices have links, a stage's hop depends on the class of the next one: each device has the
    same hop to all stages of a class. Else there is one class.
    """

    counts: Ints  # devices of each kind, [N, T]
    sets: Ints  # of each pair, ascending, then by the group's class, [P]
    groups: Ints  # of each pair, [P]
    first: Ints  # first kind of each set, [N]; T for the empty one
    classes: Ints  # of each set, [N]; the last one is that of the empty one

    @property
    def alone(self) -> Bools:
        """Whether the set is a single device, [N]."""
        return np.asarray(self.counts.sum(axis=1) == 1)


def kinds_of(devices: tuple[DeviceProfile, ...]) -> list[list[int]]:
    """Return the indices of the devices of each kind, which are alike apart from their names."""
    found, hops = defaultdict[object, list[int]](list), defaultdict[str, list[object]](list)
    for device in devices:
        for link in device.links:
            own = device.name, replace(link, to=""), device.before([link.to])
            hops[link.to].append(own)
    for place, device in enumerate(devices):
        found[replace(device, name=""), tuple(hops[device.name])].append(place)
    return list(found.values())


def num_pairs(sizes: tuple[int, ...]) -> int:
    """Return an upper bound of the pairs of the states for so many devices of each kind."""
    return prod((size + 1) * (size + 2) // 2 for size in sizes)


@lru_cache(maxsize=32)  # clusters of a round often have kinds of the same sizes
def states_of(sizes: tuple[int, ...], ordered: bool = False) -> States:
    """Return the states for so many devices of each kind; the first set is empty."""
    counts = np.array(list(product(*(range(size + 1) for size in sizes))))
    held = counts > 0
    first = np.where(held.any(axis=1), held.argmax(axis=1), len(sizes))
    sets, groups = list[Ints](), list[Ints]()
    for number in range(1, len(counts)):
        within = (counts <= counts[number]).all(axis=1)
        within &= held.any(axis=1) if ordered else held[:, first[number]]
        groups.append(np.flatnonzero(within))
        sets.append(np.full(len(groups[-1]), number))
    one = np.zeros(len(counts), dtype=int)
    return States(counts, np.concatenate(sets), np.concatenate(groups), first, one)


def ordered_states(
    problem: ClusterProblem, kinds: Sequence[Sequence[int]]
) -> tuple[States, list[ClusterProblem]]:
    """Return the states for stages with an order, and the problem without links in which each
    device's next stage is of each class."""
    states, devices = states_of(tuple(map(len, kinds)), ordered=True), problem.devices
    if not problem.linked:
        return states, [problem]
    first = [devices[own[0]] for own in kinds]
    alone = np.array([each.sharing is None for each in first])
    possible = states.alone | ~(states.counts > 0)[:, alone].any(axis=1)  # as a stage
    names, of_set = dict[tuple[DeviceProfile, ...], list[str]](), list[tuple[DeviceProfile, ...]]()
    for held in (states.counts > 0) & possible[:, None]:
        following = [each.name for each, has in zip(first, held.tolist(), strict=True) if has]
        of_set.append(tuple(each.before(following) for each in first))
        names.setdefault(of_set[-1], following)
    number = {each: place for place, each in enumerate(reversed(names))}
    classes = np.array([number[each] for each in of_set])
    order = np.lexsort((classes[states.groups], states.sets))
    problems = [
        replace(problem, devices=tuple(each.before(following) for each in devices))
        for following in reversed(names.values())
    ]
    return replace(states, groups=states.groups[order], classes=classes), problems
