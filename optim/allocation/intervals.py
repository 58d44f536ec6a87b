"""Intervals of deadlines that may hold the best round, each with the loads that may be of use."""

from dataclasses import dataclass

import numpy as np

from optim.allocation.curves import PowerCurves
from optim.problem import Bools, Floats

# A deadline inside an interval, this close to its end.
_INSIDE = 1e-9


@dataclass(frozen=True, slots=True)
class DeadlineIntervals:
    """Deadlines from ``start_s`` up to, and without, ``stop_s``, [E] each.

    ``bounds`` are of the values of all rounds there that are better than the best one known;
    ``curves`` are of all loads that such rounds may have.
    """

    start_s: Floats
    stop_s: Floats
    bounds: Floats
    curves: PowerCurves

    def __len__(self) -> int:
        return len(self.bounds)

    def middles(self, deadline_s: float) -> Floats:
        """Where to split each, [E]: at this deadline, else in the middle."""
        inside = (self.start_s < deadline_s) & (deadline_s < self.stop_s)
        return np.where(inside, deadline_s, (self.start_s + self.stop_s) / 2)

    def parts(self, which: Bools, middle_s: Floats) -> "DeadlineIntervals":
        """Some of them, before and from a deadline in the middle, with the bound of the whole."""
        start = np.column_stack([self.start_s, middle_s])[which].ravel()
        stop = np.column_stack([middle_s, self.stop_s])[which].ravel()
        kept = np.flatnonzero(which[self.curves.intervals])
        of = 2 * (which.cumsum() - 1)[self.curves.intervals[kept]]
        both, of = np.append(kept, kept), np.append(of, of + 1)
        order = np.argsort(of, kind="stable")
        curves = self.curves.among(both[order], of[order])
        useful = curves.useful(start[curves.intervals], stop[curves.intervals])
        return DeadlineIntervals(start, stop, np.repeat(self.bounds[which], 2), curves.take(useful))

    def bases(self, deadline_s: float) -> Floats:
        """Return the tangents' points [E]: next to ``deadline_s`` if it is an end, else the middle.

        Not at the end itself, where p often has a kink with two slopes.
        """
        is_end = (self.start_s == deadline_s) | (self.stop_s == deadline_s)
        beside = np.clip(deadline_s, self.start_s * (1 + _INSIDE), self.stop_s * (1 - _INSIDE))
        return np.where(is_end, beside, (self.start_s + self.stop_s) / 2)
