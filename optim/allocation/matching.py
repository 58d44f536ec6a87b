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


def missing_cost(costs: Floats, most_pairs: int) -> float:
    """What stands for a missing pair beside these costs, in matchings of up to ``most_pairs``.

    High enough that no sum of costs pays for one pair less.
    """
    return 2.0 * (most_pairs + 1) * float(np.abs(costs).max(initial=0.0)) or 1.0


def min_cost_matching(costs: Floats, missing: float) -> Matching:
    """The cheapest of the largest matchings; ``costs`` [N, J], ``missing`` where there is no pair.

    The assignment problem asks for full matchings, so missing pairs take part at their high price
    and are dropped from the answer.
    """
    units, channels = linear_sum_assignment(costs)
    picked = costs[units, channels]
    real = picked < missing
    if not real.all():
        units, channels, picked = units[real], channels[real], picked[real]
    return Matching(units, channels, float(picked.sum()))


def bottleneck(times: Floats) -> float:
    """The least time by which a largest matching of the pairs can be made; infinite: no pair."""
    ordered = np.unique(times[np.isfinite(times)])

    def matched(time: float) -> int:
        return len(min_cost_matching(np.where(times <= time, 0.0, 1.0), 1.0))

    return float(ordered[bisect_left(ordered, matched(ordered[-1]), key=matched)])
