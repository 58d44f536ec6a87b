"""Sets of a cluster's devices as numbers; devices that are alike are interchangeable.

A state counts the devices of each kind. With K different devices there are 2^K states; with few
kinds there are far fewer.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from collapipe.state import DeviceProfile
from optim.problem import Bools, Ints


@dataclass(frozen=True, slots=True)
class States:
    """All sets of devices of some kinds, and the groups that can be taken out of each.

    The number of a set minus that of a group in it is the number of the remaining set. A pair is a
    set and a group in it. If groups have no order, the group has a device of the set's first kind,
    so that every way to cut a set into groups is counted once.

    If devices have links, a stage's hop depends on the class of the next one: its device's kind, or
    T if several devices share it or it is the control unit. Else there is one class.
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
            hops[link.to].append((device.name, device.before(link.to)))
    for place, device in enumerate(devices):
        found[replace(device, name=""), tuple(hops[device.name])].append(place)
    return list(found.values())


def num_pairs(sizes: tuple[int, ...]) -> int:
    """Return an upper bound of the pairs of the states for so many devices of each kind."""
    return prod((size + 1) * (size + 2) // 2 for size in sizes)


@lru_cache(maxsize=32)  # clusters of a round often have kinds of the same sizes
def states_of(sizes: tuple[int, ...], ordered: bool = False, linked: bool = False) -> States:
    """Return the states for so many devices of each kind; the first set is empty."""
    counts = np.array(list(product(*(range(size + 1) for size in sizes))))
    held = counts > 0
    first = np.where(held.any(axis=1), held.argmax(axis=1), len(sizes))
    alone = counts.sum(axis=1) == 1
    classes = np.where(alone, first, len(sizes)) if linked else np.zeros(len(counts), dtype=int)
    sets, groups = list[Ints](), list[Ints]()
    for number in range(1, len(counts)):
        within = (counts <= counts[number]).all(axis=1)
        within &= held.any(axis=1) if ordered else held[:, first[number]]
        own = np.flatnonzero(within)
        groups.append(own[np.argsort(classes[own], kind="stable")])
        sets.append(np.full(len(groups[-1]), number))
    return States(counts, np.concatenate(sets), np.concatenate(groups), first, classes)
