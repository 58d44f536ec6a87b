"""Units and channels matched at the least cost."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from optim.problem import Floats, Ints


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs (unit, channel) in the units' order, and the sum of their costs."""

    units: Ints
    channels: Ints
    cost: float

    def __len__(self) -> int:
        return len(self.units)


def min_cost_matching(costs: Floats) -> Matching:
    """The cheapest of the largest matchings; ``costs`` [N, J], infinite where there is no pair.

    The assignment problem asks for full matchings, so missing pairs take part and are dropped from
    the answer: at a price so high that no sum of costs pays for one pair less, but no higher, or
    costs are lost to rounding.
    """
    found = np.isfinite(costs)
    largest = float(np.abs(costs[found]).max(initial=0.0))
    missing = 2.0 * (min(costs.shape) + 1) * largest or 1.0
    units, channels = linear_sum_assignment(np.where(found, costs, missing))
    real = found[units, channels]
    units, channels = units[real], channels[real]
    return Matching(units, channels, float(costs[units, channels].sum()))


def bottleneck(times: Floats) -> tuple[float, int]:
    """The least time by which a largest matching of the pairs can be made, and its size; times
    [N, J] are infinite where there is no pair."""
    ordered = np.unique(times[np.isfinite(times)])

    def matched(time: float) -> int:
        return len(min_cost_matching(np.where(times <= time, 0.0, np.inf)))

    most = matched(ordered[-1])
    return float(ordered[bisect_left(ordered, most, key=matched)]), most
