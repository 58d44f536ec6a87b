"""Match units and channels at the least cost."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from optim.problem import Floats, Ints

NODES_PER_DEADLINE = 10  # nodes of a cluster that take as long as its matchings


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs (unit, channel) in the units' order, and the sum of their costs."""

    units: Ints
    channels: Ints
    cost: float

    def __len__(self) -> int:
        return len(self.units)


def min_cost_matching(costs: Floats) -> Matching:
    """Return the cheapest maximum matching; ``costs`` [N, J] are infinite for missing pairs.

    The assignment problem needs full matchings, so missing pairs get a finite price and are dropped
    from the answer. The price exceeds any possible saving from one pair less, but not by more:
    larger prices would lose costs to rounding.
    """
    found = np.isfinite(costs)
    largest = float(np.abs(costs[found]).max(initial=0.0))
    missing = 2.0 * (min(costs.shape) + 1) * largest or 1.0
    units, channels = linear_sum_assignment(np.where(found, costs, missing))
    real = found[units, channels]
    units, channels = units[real], channels[real]
    return Matching(units, channels, float(costs[units, channels].sum()))


def bottleneck(times: Floats) -> tuple[float, int]:
    """Return the least largest time of a maximum matching, and the matching's size.

    ``times`` [N, J] are infinite for missing pairs.
    """
    ordered = np.unique(times[np.isfinite(times)])

    def matched(time: float) -> int:
        return len(min_cost_matching(np.where(times <= time, 0.0, np.inf)))

    most = matched(ordered[-1])
    return float(ordered[bisect_left(ordered, most, key=matched)]), most
