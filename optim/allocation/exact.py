"""Solve the joint round exactly: units, channels, powers and points of the fronts.

Drift ``gamma`` is solved here by a search over deadlines. Γ decreases with the power, so every pair
sends at p̄, and option (q, i, n, j) has a finish time and a cost. For a deadline D the least drift
G(D) is the cost of a matching among the options that finish by D; it decreases with D. The best
round has the least V·D + G(D) over the finish times.
"""

import math
import sys
import time
from dataclasses import dataclass

import numpy as np

from optim.allocation.matching import NODES_PER_DEADLINE, Matching, min_cost_matching
from optim.allocation.options import Choice, OptionTable, option_table, round_solution
from optim.allocation.paper_drift import allocate_paper_drift
from optim.problem import Floats, Ints
from optim.round.convergence import gamma_changes, idle_gamma
from optim.round.problem import RoundProblem, RoundSolution


def exact_allocation(problem: RoundProblem, max_nodes: float = math.inf) -> RoundSolution:
    """Minimise V·makespan + drift over all rounds that schedule as many units as possible.

    The number of units is ν, the size of the largest matching of feasible pairs of units and
    channels. It is fixed, because fewer units would always cost less. Of points with equal cost,
    the one with the fewest segments is chosen. After ``max_nodes`` the best round so far is
    returned with a valid lower bound; a deadline, or an interval, counts as
    ``NODES_PER_DEADLINE``.

    Raises ``InfeasibleRoundError`` like ``option_table``, if ν = 0.
    """
    started = time.perf_counter()
    options = option_table(problem)
    allocate = allocate_gamma if problem.options.drift == "gamma" else allocate_paper_drift
    choice = allocate(problem, options, max_nodes)
    return round_solution(problem, options, choice, "exact", started)


def allocate_gamma(problem: RoundProblem, options: OptionTable, max_nodes: float) -> Choice:
    """Return the best choice, or the best one found within ``max_nodes``."""
    idle = idle_gamma(problem.channels, problem.options)
    weight = problem.options.drift_weight
    points, finish, segments = _first_of_size(options)
    of_payloads = slice(None), np.newaxis  # to [Q, S, N, J]
    pairs, limits = options.pairs.at(*of_payloads), options.limits_w[of_payloads]
    errors = options.gradient_errors[of_payloads]
    costs = gamma_changes(limits, pairs, segments, problem, errors)
    costs = costs + options.error_costs[of_payloads]
    costs = np.where(np.isfinite(finish), costs, np.inf)
    lined_up = -1, *costs.shape[2:]  # merges the axes of payloads and sizes
    points, finish, costs = (each.reshape(lined_up) for each in (points, finish, costs))
    search = _Search(finish, costs, weight)
    best, bound = _best(search, max_nodes)
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
    """Find the point that finishes first for each payload, S, unit and channel. Returns the points
    and their finish times, [Q, S, N, J], and the values of S, [S, 1, 1]. Γ and ρ are equal for all
    points with the same S and payload."""
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
    """A matching, the indices of its options, its last unit's finish time, and V·D + G."""

    matching: Matching
    points: Ints
    makespan_s: float
    value: float

    def rank(self) -> tuple[int, float]:
        """Lower is better: more units, then a lower value."""
        return -len(self.matching), self.value


@dataclass(frozen=True, slots=True)
class _Search:
    """Computes G(D) and its lower bounds; both arrays [I, N, J] are infinite if infeasible."""

    finish_s: Floats
    costs: Floats
    weight: float

    def round(self, deadline_s: float) -> _MatchedRound:
        """Return the cheapest round of the largest size that meets the deadline. Of options with
        equal costs the first payload is chosen."""
        costs = np.where(self.finish_s <= deadline_s, self.costs, np.inf)
        matching = min_cost_matching(costs.min(axis=0))
        points = costs[:, matching.units, matching.channels].argmin(axis=0)
        finish = self.finish_s[points, matching.units, matching.channels]
        makespan = float(finish.max(initial=0.0))
        return _MatchedRound(matching, points, makespan, self.weight * makespan + matching.cost)

    def relaxed(self, cardinality: int) -> tuple[Floats, Floats]:
        """Return ascending deadlines, and a lower bound of G from each deadline up to the next.

        The bound lets units share a channel. It is the sum of the ν smallest least costs of units
        over their points that finish by the deadline on any channel.
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
        """Return the ascending finish times whose bound of V·D + G(D) may be below ``value``, and
        these bounds.

        ``deadlines_s`` and ``drifts`` come from ``relaxed``.
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

    The sum is infinite while fewer than ν units have an option. A unit's least cost only decreases,
    so a unit enters the ν smallest only when its cost decreases.
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


def _best(search: _Search, max_nodes: float) -> tuple[_MatchedRound, float]:
    """Return the best round, and a lower bound of V·D + G(D) over all rounds."""
    # Infeasible options have infinite finish times, which exceed this.
    best = search.round(sys.float_info.max)
    cardinality = len(best.matching)
    relaxed, drifts = search.relaxed(cardinality)
    # The round at the relaxation's best deadline is usually close to the best round.
    guess = search.round(relaxed[(search.weight * relaxed + drifts).argmin()])
    best = min(best, guess, key=_MatchedRound.rank)
    deadlines, bounds = search.candidates(relaxed, drifts, best.value)
    while len(alive := np.flatnonzero(bounds < best.value)):
        if max_nodes <= 0:
            return best, float(bounds[alive].min())
        max_nodes -= NODES_PER_DEADLINE
        deadlines, bounds = deadlines[alive], bounds[alive]
        middle = len(deadlines) // 2
        found = search.round(deadlines[middle])
        best = min(best, found, key=_MatchedRound.rank)
        feasible = len(found.matching) == cardinality
        settled = int(np.searchsorted(deadlines, found.makespan_s)) if feasible else 0
        # G decreases with D: earlier deadlines have no smaller G, and from the found makespan up to
        # the middle G is equal.
        lower = search.weight * deadlines[:settled] + found.matching.cost
        bounds[:settled] = np.maximum(bounds[:settled], lower)
        bounds[settled : middle + 1] = math.inf
    return best, best.value
