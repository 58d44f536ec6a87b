"""Solve the round under drift ``paper`` (eq. 32) to 1e-9 by branch and bound over deadlines.

Power has a cost, so each unit sends as slowly as the deadline D allows. A load's cost Y·(S + p(D))
decreases with D and is convex; V·D + ΣY·(S + p) of fixed loads has one minimum. On an interval of
deadlines each cost lies above its tangent. The cost of the best matching of tangents is concave in
D, so the smaller of its two end values bounds the interval from below. Tangents next to the best
deadline found exclude wide intervals, because the slopes there sum to zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq

from optim.allocation.curves import PowerCurves, power_curves, relaxed_curves
from optim.allocation.matching import NODES_PER_DEADLINE, Matching, bottleneck, min_cost_matching
from optim.allocation.options import Choice, OptionTable
from optim.problem import Bools, Floats, Ints
from optim.round.problem import RoundProblem

# An interval is dropped if its bound is within this relative distance of the best round.
_TOLERANCE = 1e-10
_TURNS, _INTERVALS = 2, 32
_BOTH_SIDES = np.array([1 - 1e-15, 1 + 1e-15])
# A deadline inside an interval, this close to its end.
_INSIDE = 1e-9


def allocate_paper_drift(problem: RoundProblem, options: OptionTable, max_nodes: float) -> Choice:
    """Return the best choice, or the best one found within ``max_nodes``."""
    first, most = bottleneck(options.finish_s.min(axis=(0, 1)))
    curves_of = partial(power_curves, problem, options)
    search = DeadlineSearch(problem.options.drift_weight, most, curves_of)
    best, bound = search.best(relaxed_curves(problem, options), first, max_nodes)
    powers, _ = best.curves.power(best.deadline_s)
    units, payloads, points = best.curves.places
    return Choice(units, best.channels, payloads, points, powers[:, 0], bound)


@dataclass(frozen=True, slots=True)
class DeadlineIntervals:
    """Intervals [``start_s``, ``stop_s``) of deadlines that may contain the best round, [E] each.

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
        inside = np.clip(deadline_s, self.start_s * (1 + _INSIDE), self.stop_s * (1 - _INSIDE))
        return np.where(is_end, inside, (self.start_s + self.stop_s) / 2)


@dataclass(frozen=True, slots=True)
class SlowRound:
    """Loads, each on one channel, their best deadline D, and the value V·D plus their costs."""

    curves: PowerCurves
    channels: Ints
    deadline_s: float
    value: float


@dataclass(frozen=True, slots=True)
class DeadlineSearch:
    """Branch and bound for weight V and rounds of ν = ``most`` units. ``curves_of`` makes the
    curves of loads."""

    weight: float
    most: int
    curves_of: Callable[[Ints], PowerCurves]

    def best(
        self, relaxed: PowerCurves, first_s: float, max_nodes: float
    ) -> tuple[SlowRound, float]:
        """Return the best round, and a lower bound of all rounds. No round can end before
        ``first_s``."""
        best, intervals = self.prepared(relaxed, first_s)
        least = best.value  # least bound of intervals that are too short to be split
        while len(intervals) and max_nodes > 0:
            max_nodes -= len(intervals) * NODES_PER_DEADLINE
            best, intervals = self.bounded(best, intervals)
            middle = intervals.middles(best.deadline_s)
            long = (intervals.start_s < middle) & (middle < intervals.stop_s)
            alive = intervals.bounds < best.value * (1 - _TOLERANCE)
            least = min([least, *intervals.bounds[alive & ~long]])
            intervals = intervals.parts(alive & long, middle)
        return best, min([best.value, least, *intervals.bounds])

    def prepared(self, relaxed: PowerCurves, first_s: float) -> tuple[SlowRound, DeadlineIntervals]:
        """Return a good round, and intervals of deadlines that contain all better rounds."""
        # Worse than any round, because no round is known yet.
        best = SlowRound(relaxed, np.zeros(0, dtype=np.intp), first_s, math.inf)
        edges = np.array([first_s, math.inf])
        for _ in range(_TURNS):
            bounds, forced = self.relaxed_bounds(relaxed, edges)
            guess = min(edges[bounds.argmin() + 1], max(first_s, relaxed.finish_s.max()))
            best = self.round_at(guess, relaxed, best)
            needed = forced < best.value
            if needed.any():
                edges = self.narrowed(edges, bounds, best.value)
                relaxed = relaxed.take(np.flatnonzero(needed.any(axis=0)))
        bounds, forced = self.relaxed_bounds(relaxed, edges)
        interval, load = np.nonzero(forced < best.value)
        curves = self.curves_of(relaxed.among(load, interval).loads)
        return best, DeadlineIntervals(edges[:-1], edges[1:], bounds, curves)

    def narrowed(self, edges_s: Floats, bounds: Floats, value: float) -> Floats:
        """Return interval edges around all deadlines whose rounds may be below ``value``.

        In an interval the drift is at least its bound minus V·D at its start. Deadlines so late
        that V·D plus this drift exceeds ``value`` are therefore excluded.
        """
        alive = np.flatnonzero(bounds < value)
        start, stop = edges_s[alive[-1]], edges_s[alive[-1] + 1]
        last = min(stop, start + (value - bounds[alive[-1]]) / self.weight)
        return np.linspace(edges_s[alive[0]], last, _INTERVALS + 1)

    def relaxed_bounds(self, relaxed: PowerCurves, edges_s: Floats) -> tuple[Floats, Floats]:
        """Return lower bounds of all rounds between each two edges, [E], and of the rounds with
        each load, [E, R].

        The first bound sums the ν least costs of units on any channels at the later edge, because
        costs do not increase with the deadline. The bound with a load forces the load into that
        sum: it replaces its unit's cheapest load, or the ν-th unit if its unit is not in the sum.
        If this bound is not below a known round's value, no better round uses the load.
        """
        start, stop = edges_s[:-1, np.newaxis], edges_s[1:, np.newaxis]
        interval, load = np.nonzero(relaxed.useful(start, stop))
        of = relaxed.take(load)
        powers, _ = of.power(stop[interval])
        costs = np.full((len(stop), len(relaxed)), np.inf)
        costs[interval, load] = of.costs(powers)[:, 0]
        least = np.minimum.reduceat(costs, relaxed.starts, axis=1)
        cheapest = np.partition(least, self.most - 1, axis=1)[:, : self.most]
        bounds = self.weight * edges_s[:-1] + cheapest.sum(axis=1)
        spared = np.minimum(least, cheapest[:, -1:])
        sizes = np.diff(relaxed.starts, append=len(relaxed))
        with np.errstate(invalid="ignore"):  # no ν units: infinite less infinite
            forced = bounds[:, np.newaxis] + (costs - np.repeat(spared, sizes, axis=1))
        return bounds, forced

    def round_at(self, deadline_s: float, relaxed: PowerCurves, best: SlowRound) -> SlowRound:
        """Return the better of ``best`` and the cheapest round of these loads at a deadline."""
        useful = relaxed.useful(deadline_s, np.nextafter(deadline_s, np.inf))
        curves = self.curves_of(relaxed.loads[useful])
        powers, _ = curves.power(deadline_s)
        costs = np.where(curves.finish_s <= deadline_s, curves.costs(powers), np.inf)
        (matching,) = _matchings(curves, costs, 1)
        if len(matching) < self.most:
            return best
        return self.valley(best, *_cheapest(curves, costs, matching))

    def bounded(
        self, best: SlowRound, intervals: DeadlineIntervals
    ) -> tuple[SlowRound, DeadlineIntervals]:
        """Raise the intervals' bounds by matchings of tangents. Returns the better of ``best`` and
        a round found on the way, and the intervals.

        A load's tangent is taken at the interval's base, or at the load's first feasible deadline
        if that is later; the load is infeasible before it.
        """
        curves, of = intervals.curves, intervals.curves.intervals
        start, stop = intervals.start_s[of, np.newaxis], intervals.stop_s[of, np.newaxis]
        base = np.clip(curves.finish_s, intervals.bases(best.deadline_s)[of, np.newaxis], stop)
        powers, slopes = curves.power(base)
        costs, slopes = curves.costs(powers), curves.queues * slopes
        costs = np.where(curves.finish_s < stop, costs, np.inf)
        bounds = np.full(len(intervals), np.inf)
        for end_s, end in (intervals.stop_s, stop), (intervals.start_s, start):
            tangents = costs + slopes * (end - base)
            found = _matchings(curves, tangents, len(intervals))
            values = self.weight * end_s + [each.cost for each in found]
            values[[len(each) < self.most for each in found]] = np.inf
            bounds = np.minimum(bounds, values)
            lowest = int(values.argmin())
            if values[lowest] < best.value * (1 - _TOLERANCE):
                best = self.valley(best, *_cheapest(curves, tangents, found[lowest]))
        return best, replace(intervals, bounds=np.maximum(bounds, intervals.bounds))

    def valley(self, best: SlowRound, chosen: PowerCurves, channels: Ints) -> SlowRound:
        """Return the better of ``best`` and the round of fixed loads at their best deadline.

        At the best deadline V + Σ Y·dp/dD changes its sign. It may jump at a bend of p, for which
        root finding is slow, so bends are tried first.
        """

        def slope(deadline_s: Floats | float) -> Floats:
            _, slopes = chosen.power(deadline_s)
            return np.asarray(self.weight + (chosen.queues * slopes).sum(axis=0))

        low = chosen.finish_s.max()
        bends = chosen.bends_s * _BOTH_SIDES
        tried = np.append(low, np.unique(bends[bends > low]))
        place = int(np.searchsorted(slope(tried), 0.0))
        low, high = tried[max(place - 1, 0)], tried[min(place, len(tried) - 1)]
        step = max(high - chosen.latency_s.min(), np.spacing(high))
        while slope(high)[0] < 0:
            low, high, step = high, high + step, 2 * step
        if high > low:
            high = brentq(lambda each: slope(each)[0], low, high, xtol=1e-300)
        powers, _ = chosen.power(high)
        cost = float(chosen.costs(powers).sum())
        found = SlowRound(chosen, channels, float(high), self.weight * float(high) + cost)
        return min(best, found, key=lambda each: each.value)


def _matchings(curves: PowerCurves, costs: Floats, count: int) -> list[Matching]:
    """Return the cheapest maximum matching of units and channels for each of ``count`` intervals.

    Units are given by their index in ``starts``; ``costs`` [R, J] of infeasible pairs are infinite.
    """
    least = np.minimum.reduceat(costs, curves.starts) if len(curves) else costs
    edges = np.searchsorted(curves.intervals[curves.starts], np.arange(count + 1)).tolist()
    each = [min_cost_matching(least[start:stop]) for start, stop in pairwise(edges)]
    return [replace(of, units=of.units + start) for of, start in zip(each, edges, strict=False)]


def _cheapest(curves: PowerCurves, costs: Floats, matching: Matching) -> tuple[PowerCurves, Ints]:
    """Return the cheapest loads of a matching, and their channels."""
    units, channels = matching.units, matching.channels
    stops = np.append(curves.starts, len(curves))
    ranges = zip(stops[units].tolist(), stops[units + 1].tolist(), channels.tolist(), strict=True)
    chosen = [start + costs[start:stop, channel].argmin() for start, stop, channel in ranges]
    return curves.on(np.array(chosen, dtype=np.intp), channels), channels
