"""The round under drift ``gamma``, exactly: a search over deadlines.

Γ falls with the power, so that every pair sends at p̄ and option (q, i, n, j) is a finish time and
a cost. For a deadline D the least drift G(D) is a matching among the options that finish by D; it
falls as D grows. The best round is the least V·D + G(D) over the options' finish times.
"""

import math
import sys
import time
from dataclasses import dataclass

import numpy as np

from optim.allocation.matching import Matching, min_cost_matching
from optim.allocation.options import Choice, OptionTable
from optim.convergence import gamma_changes, idle_gamma
from optim.problem import Floats, Ints, RoundProblem


def allocate_gamma(problem: RoundProblem, options: OptionTable, stop_at: float) -> Choice:
    """The best choice, or the best found when ``time.perf_counter()`` passes ``stop_at``."""
    idle = idle_gamma(problem.channels, problem.options)
    weight = problem.options.drift_weight
    points, finish, segments = _first_of_size(options)
    of_payloads = slice(None), np.newaxis  # to [Q, S, N, J]
    pairs, limits = options.pairs.at(*of_payloads), options.limits_w[of_payloads]
    errors = options.gradient_errors[of_payloads]
    costs = gamma_changes(limits, pairs, segments, problem, errors)
    costs = costs + options.error_costs[of_payloads]
    costs = np.where(np.isfinite(finish), costs, np.inf)
    lined_up = -1, *costs.shape[2:]  # payload after payload
    points, finish, costs = (each.reshape(lined_up) for each in (points, finish, costs))
    search = _Search(finish, costs, weight)
    best, bound = _best(search, stop_at)
    matching = best.matching
    pairs_of = matching.units, matching.channels
    places, payloads = (best.points, *pairs_of), best.points // len(segments)
    return Choice(
        units=matching.units,
        channels=matching.channels,
        payloads=payloads,
        points=points[places],
        powers_w=options.limits_w[(payloads, *pairs_of)],
        bound=bound + idle * math.fsum(problem.queues),
    )


def _first_of_size(options: OptionTable) -> tuple[Ints, Floats, Floats]:
    """Of each payload, S, unit and channel the point that finishes first, and when, [Q, S, N, J].

    And S, [S, 1, 1]. Γ and ρ are the same for all points of an S with the same payload.
    """
    sizes = np.unique(options.points.segments)
    sizes = sizes[sizes > 0]
    payloads, _, *pairs = options.finish_s.shape
    points = np.empty((payloads, len(sizes), *pairs), dtype=np.int64)
    finish = np.empty(points.shape)
    for place, size in enumerate(sizes):
        of_size = np.where(options.points.segments == size, options.finish_s, np.inf)
        points[:, place], finish[:, place] = of_size.argmin(axis=1), of_size.min(axis=1)
    return points, finish, sizes[:, np.newaxis, np.newaxis]


@dataclass(frozen=True, slots=True)
class _MatchedRound:
    """A matching, the places of its options, when its last unit finishes; V·D + G."""

    matching: Matching
    points: Ints
    makespan_s: float
    value: float

    def rank(self) -> tuple[int, float]:
        """Lower is better: more units, then a lower value."""
        return -len(self.matching), self.value


@dataclass(frozen=True, slots=True)
class _Search:
    """G(D), exactly and from below, for finish times and costs [I, N, J], both infinite where an
    option is infeasible."""

    finish_s: Floats
    costs: Floats
    weight: float

    def round(self, deadline_s: float) -> _MatchedRound:
        """The cheapest of the largest rounds by the deadline; of equal costs the first payload."""
        costs = np.where(self.finish_s <= deadline_s, self.costs, np.inf)
        matching = min_cost_matching(costs.min(axis=0))
        points = costs[:, matching.units, matching.channels].argmin(axis=0)
        finish = self.finish_s[points, matching.units, matching.channels]
        makespan = float(finish.max(initial=0.0))
        return _MatchedRound(matching, points, makespan, self.weight * makespan + matching.cost)

    def relaxed(self, cardinality: int) -> tuple[Floats, Floats]:
        """Deadlines in order, and a bound of G from each up to the next.

        There, units may share a channel: it is the sum of the ν least costs of units, each over
        its points that finish by the deadline on some channel.
        """
        finish = self.finish_s.min(axis=2)
        feasible = np.isfinite(finish)
        order = np.argsort(finish[feasible])
        units = np.nonzero(feasible)[1][order]
        costs = self.costs.min(axis=2)[feasible][order]
        drifts = _least_sums(units, costs, cardinality)
        possible = np.isfinite(drifts)
        return finish[feasible][order][possible], drifts[possible]

    def candidates(
        self, deadlines_s: Floats, drifts: Floats, value: float
    ) -> tuple[Floats, Floats]:
        """Finish times that could be below ``value``, ascending, with their bounds of V·D + G(D).

        ``deadlines_s`` and ``drifts`` are ``relaxed``'s.
        """
        alive = np.flatnonzero(self.weight * deadlines_s + drifts < value)
        if not len(alive):
            return np.zeros(0), np.zeros(0)
        stops = np.append(deadlines_s, sys.float_info.max)
        first, last = deadlines_s[alive[0]], stops[alive[-1] + 1]
        finish = np.unique(self.finish_s[(self.finish_s >= first) & (self.finish_s <= last)])
        drift = drifts[np.searchsorted(deadlines_s, finish, side="right") - 1]
        return finish, self.weight * finish + drift


def _least_sums(units: Ints, costs: Floats, cardinality: int) -> Floats:
    """Return, after each option (unit, cost), the sum of the ν smallest of the units' least costs.

    Infinite while fewer than ν units have an option. A unit's least cost only falls, so a unit
    enters the ν smallest only by a lower cost of its own.
    """
    chosen = dict[int, float]()
    sums, dearest, total = np.empty(len(units)), math.inf, math.inf
    for place, (unit, cost) in enumerate(zip(units.tolist(), costs.tolist(), strict=True)):
        full = len(chosen) == cardinality
        if cost < chosen.get(unit, dearest if full else math.inf):
            if full and unit not in chosen:
                del chosen[max(chosen, key=chosen.__getitem__)]
            chosen[unit] = cost
            if len(chosen) == cardinality:
                dearest, total = max(chosen.values()), sum(chosen.values())
        sums[place] = total
    return sums


def _best(search: _Search, stop_at: float) -> tuple[_MatchedRound, float]:
    """The best round, and a bound of every round's V·D + G(D)."""
    # Infinite finish times are infeasible, and later than this.
    best = search.round(sys.float_info.max)
    cardinality = len(best.matching)
    relaxed, drifts = search.relaxed(cardinality)
    # Where the relaxation is best, a round is seldom far from the best one.
    guess = search.round(relaxed[(search.weight * relaxed + drifts).argmin()])
    best = min(best, guess, key=_MatchedRound.rank)
    deadlines, bounds = search.candidates(relaxed, drifts, best.value)
    while len(alive := np.flatnonzero(bounds < best.value)):
        if time.perf_counter() >= stop_at:
            return best, float(bounds[alive].min())
        deadlines, bounds = deadlines[alive], bounds[alive]
        middle = len(deadlines) // 2
        found = search.round(deadlines[middle])
        best = min(best, found, key=_MatchedRound.rank)
        feasible = len(found.matching) == cardinality
        settled = int(np.searchsorted(deadlines, found.makespan_s)) if feasible else 0
        # G falls with D: no deadline below has less, and none from the makespan on differs.
        lower = search.weight * deadlines[:settled] + found.matching.cost
        bounds[:settled] = np.maximum(bounds[:settled], lower)
        bounds[settled : middle + 1] = math.inf
    return best, best.value
