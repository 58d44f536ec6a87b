"""Means over seeds and their 95 % intervals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95 % interval by Student's t; one seed gives no interval."""

    mean: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """``low`` and ``high``; both are the mean if there is no interval."""
        if self.low is None or self.high is None:
            return self.mean, self.mean
        return self.low, self.high

    def __neg__(self) -> "Interval":
        if self.low is None or self.high is None:
            return Interval(-self.mean, None, None)
        return Interval(-self.mean, -self.high, -self.low)


def over_seeds(values: Iterable[float]) -> Interval:
    """Return the interval of the mean, given one value per seed."""
    values = [*values]
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, None)
    deviation = stdev(values) / math.sqrt(count)  # of the mean
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation
    return Interval(mean, mean - half, mean + half)
