"""Who shares masks with whom, and how many must be left at the end.

Fewer than 20 units all do with one another. More stand in a ring, in an order that is drawn anew
for every round, and each does with the nearest ones on both sides (the Harary graph on a random
order of Bell et al. 2020, section 3.3): as many as make three failures improbable enough, so that
their number grows with the logarithm of the units' in the end.
"""

import functools
import math
from collections.abc import Collection

SPARSE_FROM = 20  # units
_COLLUDING = 0.2  # of the units may tell the server all that they know
_MISSED, _BROKEN = 2.0**-20, 2.0**-40  # probabilities: of no sum, of a secret that is told


def units_needed(units: int, threshold: float) -> int:
    """How many of the round's ``units`` must finish: the share ``threshold``, and more than half of
    them however close to 1/2 that is."""
    return max(units // 2 + 1, math.ceil(threshold * units - 1e-9))  # 2/3 of 3 are 2


def noise_parts(units: int, threshold: float) -> int:
    """Of how many units the noise is enough, where units add it: one less than must finish, for
    each knows its own."""
    return max(1, units_needed(units, threshold) - 1)


def shares_needed(units: int, threshold: float) -> int:
    """How many shares restore a secret: more than half of those that there are, so that no two
    groups of units can restore both secrets of one."""
    if units < SPARSE_FROM:
        return units_needed(units, threshold)
    return _degree(units, threshold) // 2 + 1


def neighbours(unit: int, order: Collection[int], threshold: float) -> frozenset[int]:
    """Those that ``unit`` shares masks with, where all stand in this ``order``."""
    ring = list(order)
    if len(ring) < SPARSE_FROM:
        return frozenset(ring) - {unit}
    place, reach = ring.index(unit), _degree(len(ring), threshold) // 2
    steps = (step for far in range(1, reach + 1) for step in (far, -far))
    return frozenset(ring[(place + step) % len(ring)] for step in steps) - {unit}


@functools.lru_cache(maxsize=64)
def _degree(units: int, threshold: float) -> int:
    """The least even number of neighbours such that, with as many units gone as may be and a fifth
    colluding, these probabilities hold, each a sum over all units or pairs of them: that a unit's
    secrets cannot be restored is 2⁻²⁰ at most, that the colluding units know a secret 2⁻⁴⁰, and
    that the masks of the others come apart into two sums 2⁻⁴⁰."""
    left, colluding = units_needed(units, threshold), math.floor(_COLLUDING * units)
    for degree in range(2, units - 1, 2):
        need = degree // 2 + 1
        # a unit that is there has a share of its own; one that is gone has none
        unrestored = units * max(
            _drawn(units, left - 1, degree, range(need - 1)),
            _drawn(units, left, degree, range(need)),
        )
        known = units * _drawn(units, colluding, degree, range(need, degree + 1))
        apart = _comes_apart(units, units - left + colluding, degree)
        if unrestored <= _MISSED and known <= _BROKEN and apart <= _BROKEN:
            return degree
    return units - units % 2  # everybody: half of it reaches round the ring


def _comes_apart(units: int, removed: int, degree: int) -> float:
    """A bound of the probability that the ring falls into parts without the ``removed`` units: two
    gaps do it that no pair of neighbours reaches across, of half a ``degree`` each."""
    both = math.prod((removed - k) / (units - k) for k in range(min(degree, removed + 1)))
    return math.comb(units, 2) * both


def _drawn(units: int, marked: int, degree: int, found: range) -> float:
    """The probability that of ``degree`` others, drawn without return, as many are among the
    ``marked`` ones as ``found`` says."""
    others, whole = units - 1, _log_ways(units - 1, degree)
    return math.fsum(
        math.exp(_log_ways(marked, k) + _log_ways(others - marked, degree - k) - whole)
        for k in found
        if k <= marked and degree - k <= others - marked
    )


def _log_ways(of: int, some: int) -> float:
    """The logarithm of how many ways there are to choose some."""
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)
