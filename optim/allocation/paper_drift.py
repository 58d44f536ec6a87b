"""The round under drift ``paper`` (eq. 32), to 1e-9: branch and bound over deadlines.

Power costs here, so that each unit sends as slowly as the deadline D allows: an option's cost
Y·(S + p(D)) falls with D and is convex. For fixed options V·D + ΣY·(S + p) has one valley. Over an
interval of deadlines every cost lies above its tangent, and the matching of tangents is concave in
D: the lesser of its two ends bounds the interval. Tangents at the best deadline found settle wide
intervals, since its own slopes add up to nothing.
"""

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import brentq

from optim.allocation.curves import PowerCurves, feasible_curves, relaxed_curves
from optim.allocation.matching import Matching, bottleneck, min_cost_matching, missing_cost
from optim.allocation.options import Choice, OptionTable
from optim.problem import Floats, Ints, RoundProblem

# Spans are dropped whose bound is within this of the best round, relative.
_TOLERANCE = 1e-10
_INTERVALS = 32


def allocate_paper_drift(problem: RoundProblem, options: OptionTable, stop_at: float) -> Choice:
    """The best choice, or the best found when ``time.perf_counter()`` passes ``stop_at``."""
    finish = options.finish_s.min(axis=(0, 1))
    search = DeadlineSearch(problem.options.drift_weight, finish.shape)
    first = bottleneck(finish)
    curves, relaxed = feasible_curves(problem, options), relaxed_curves(problem, options)
    best, bound = search.best(curves, relaxed, first, stop_at)
    powers, _ = best.curves.power(best.deadline_s)
    units, channels, payloads, points = best.curves.places
    return Choice(units, channels, payloads, points, powers, bound)


@dataclass(frozen=True, slots=True)
class SlowRound:
    """Options that form a matching, the deadline that is best for them, and V·D + their costs."""

    curves: PowerCurves
    deadline_s: float
    value: float


@dataclass(frozen=True, slots=True, order=True)
class DeadlineInterval:
    """Deadlines from ``start_s`` up to, and without, ``stop_s``, and a bound of their values."""

    bound: float
    start_s: float
    stop_s: float
    curves: PowerCurves = field(compare=False)


@dataclass(slots=True)
class DeadlineSearch:
    """Branch and bound for weight V and N×J pairs."""

    weight: float
    shape: tuple[int, ...]
    seen: set[bytes] = field(default_factory=set)

    def best(
        self, curves: PowerCurves, relaxed: PowerCurves, first_s: float, stop_at: float
    ) -> tuple[SlowRound, float]:
        """The best round, and a bound of all. No round is done before ``first_s``."""
        best, edges, drifts = self.prepared(curves, relaxed, first_s)
        curves = curves.within(edges[0], np.nextafter(edges[-1], np.inf))
        bounds = (self.weight * edges[:-1] + drifts[1:]).tolist()
        ends = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        intervals = [
            DeadlineInterval(bound, *end, curves) for bound, end in zip(bounds, ends, strict=True)
        ]
        heapq.heapify(intervals)
        least = best.value  # of intervals that are too short to be split
        while intervals and intervals[0].bound < best.value * (1 - _TOLERANCE):
            if time.perf_counter() >= stop_at:
                break
            interval = heapq.heappop(intervals)
            parts = list(_parts(interval, best.deadline_s))
            if not parts:
                least = min(least, interval.bound)
            for part in parts:
                bound, best = self.bound(part, best, len(best.curves))
                heapq.heappush(intervals, replace(part, bound=max(bound, interval.bound)))
        return best, min([best.value, least, *(interval.bound for interval in intervals[:1])])

    def prepared(
        self, curves: PowerCurves, relaxed: PowerCurves, first_s: float
    ) -> tuple[SlowRound, Floats, Floats]:
        """A good round, deadlines around all better ones, and bounds of the drift by each."""
        costs = curves.costs(curves.floors_w)
        floor = self.match(curves, costs)
        best = self.valley(curves.take(self.cheapest(curves, costs, floor)))
        edges = drifts = np.zeros(0)
        # The second time for a range that the first one has shortened.
        for _ in range(2):
            last = max((best.value - floor.cost) / self.weight, first_s)
            edges = np.linspace(first_s, last, _INTERVALS + 1)
            drifts = _relaxed_drift(relaxed, edges, len(floor))
            guess = float(edges[(self.weight * edges + drifts).argmin()])
            best = min(best, self.round_at(curves, guess), key=lambda each: each.value)
        return best, edges, drifts

    def round_at(self, curves: PowerCurves, deadline_s: float) -> SlowRound:
        """The options that are cheapest at a deadline, at the deadline that is best for them."""
        early = curves.at(deadline_s)
        powers, _ = early.power(deadline_s)
        costs = early.costs(powers)
        return self.valley(early.take(self.cheapest(early, costs, self.match(early, costs))))

    def bound(
        self, interval: DeadlineInterval, best: SlowRound, cardinality: int
    ) -> tuple[float, SlowRound]:
        """A bound of all rounds in the interval; and the better of ``best`` and one found.

        Tangents are taken at the interval's end, but at its start if the best deadline is close
        before it, for the options that can keep that.
        """
        curves = interval.curves
        base = np.full(len(curves), interval.stop_s)
        if 0 <= interval.start_s - best.deadline_s < interval.stop_s - interval.start_s:
            base[curves.finish_s <= interval.start_s] = interval.start_s
        powers, slopes = curves.power(base)
        costs, slopes = curves.costs(powers), curves.queues * slopes
        values = []
        for end in (interval.stop_s, interval.start_s):
            tangents = costs + slopes * (end - base)
            matching = self.match(curves, tangents)
            if len(matching) < cardinality:
                return math.inf, best
            values.append(self.weight * end + matching.cost)
            if values[-1] < best.value * (1 - _TOLERANCE):
                best = self.improved(best, curves, self.cheapest(curves, tangents, matching))
        # At its end every option costs least, so that V·start + the drift there is a bound too.
        bound = max(min(values), values[0] - self.weight * (interval.stop_s - interval.start_s))
        return bound, best

    def improved(self, best: SlowRound, curves: PowerCurves, chosen: Ints) -> SlowRound:
        """The better of ``best`` and the chosen options at their best deadline."""
        key = curves.options[chosen].tobytes()
        if key in self.seen:
            return best
        self.seen.add(key)
        return min(best, self.valley(curves.take(chosen)), key=lambda each: each.value)

    def match(self, curves: PowerCurves, costs: Floats) -> Matching:
        """The cheapest of the largest matchings, of each pair its cheapest option."""
        if not len(curves):
            return Matching(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp), 0.0)
        least = np.minimum.reduceat(costs, curves.starts)
        missing = missing_cost(least, min(self.shape))
        pairs = np.full(self.shape, missing)
        pairs.flat[curves.pairs] = least
        return min_cost_matching(pairs, missing)

    def cheapest(self, curves: PowerCurves, costs: Floats, matching: Matching) -> Ints:
        """The options that the matching's costs are of."""
        pairs = matching.units * self.shape[1] + matching.channels
        found, stops = np.searchsorted(curves.pairs, pairs), np.append(curves.starts, len(curves))
        ranges = zip(curves.starts[found].tolist(), stops[found + 1].tolist(), strict=True)
        chosen = [start + costs[start:stop].argmin() for start, stop in ranges]
        return np.array(chosen, dtype=np.intp)

    def valley(self, chosen: PowerCurves) -> SlowRound:
        """Fixed options at their best deadline, where V + Σ Y·dp/dD changes its sign."""
        low = high = float(chosen.finish_s.max())
        step = max(high - float(chosen.latency_s.min()), float(np.spacing(high)))
        while self.slope(chosen, high) < 0:
            low, high, step = high, high + step, 2 * step
        if high > low:
            high = brentq(lambda deadline: self.slope(chosen, deadline), low, high, xtol=1e-300)
        powers, _ = chosen.power(high)
        cost = float(chosen.costs(powers).sum())
        return SlowRound(chosen, high, self.weight * high + cost)

    def slope(self, chosen: PowerCurves, deadline_s: float) -> float:
        """d/dD of V·D and the costs of the options."""
        return self.weight + float(chosen.queues @ chosen.power(deadline_s)[1])


def _parts(interval: DeadlineInterval, deadline_s: float) -> Iterator[DeadlineInterval]:
    """The interval's halves, or its parts beside the best deadline; none if too short."""
    middle = (interval.start_s + interval.stop_s) / 2
    if interval.start_s < deadline_s < interval.stop_s:
        middle = deadline_s
    if not interval.start_s < middle < interval.stop_s:
        return
    for start, stop in ((interval.start_s, middle), (middle, interval.stop_s)):
        yield DeadlineInterval(interval.bound, start, stop, interval.curves.within(start, stop))


def _relaxed_drift(relaxed: PowerCurves, deadlines_s: Floats, cardinality: int) -> Floats:
    """A bound of the drift by each deadline: the ν units that cost least, on whatever channels."""
    deadlines = deadlines_s[:, np.newaxis]
    useful = (relaxed.enter_s <= deadlines) & (deadlines <= relaxed.leave_s)
    edge, option = np.nonzero(useful & (relaxed.finish_s <= deadlines))
    of = relaxed.take(option)
    powers, _ = of.power(deadlines_s[edge])
    costs = np.full(useful.shape, np.inf)
    costs[edge, option] = of.costs(powers)
    least = np.minimum.reduceat(costs, relaxed.starts, axis=1)
    cheapest: Floats = np.partition(least, cardinality - 1, axis=1)[:, :cardinality]
    return np.asarray(cheapest.sum(axis=1))
