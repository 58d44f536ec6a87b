"""Intervals of deadlines that may contain the best round, each with its possibly useful loads."""

from dataclasses import dataclass

import numpy as np

from optim.allocation.curves import PowerCurves
from optim.problem import Bools, Floats

# A deadline inside an interval, this close to its end.
_INSIDE = 1e-9


@dataclass(frozen=True, slots=True)
class DeadlineIntervals:
    """Intervals [``start_s``, ``stop_s``) of deadlines, [E] each.

    ``bounds`` are lower bounds of the values of all rounds in an interval that beat the best known
    round. ``curves`` has all loads that such rounds may use.
    """

    start_s: Floats
    stop_s: Floats
    bounds: Floats
    curves: PowerCurves

    def __len__(self) -> int:
        return len(self.bounds)

    def middles(self, deadline_s: float) -> Floats:
        """Return the deadline at which to split each interval, [E]: ``deadline_s`` if it is inside,
        else the middle."""
        inside = (self.start_s < deadline_s) & (deadline_s < self.stop_s)
        return np.where(inside, deadline_s, (self.start_s + self.stop_s) / 2)

    def parts(self, which: Bools, middle_s: Floats) -> "DeadlineIntervals":
        """Select intervals and split each at its deadline in ``middle_s``. Both parts keep the
        bound of the whole interval."""
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

        The end itself is avoided, because p often has a kink with two slopes there.
        """
        is_end = (self.start_s == deadline_s) | (self.stop_s == deadline_s)
        beside = np.clip(deadline_s, self.start_s * (1 + _INSIDE), self.stop_s * (1 - _INSIDE))
        return np.where(is_end, beside, (self.start_s + self.stop_s) / 2)
