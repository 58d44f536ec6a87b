"""Algorithm 3 of CollaPipe (arXiv 2509.19855): alternate channels and power for given S and m."""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from optim.allocation.matching import Matching, min_cost_matching
from optim.allocation.options import Choice, OptionTable, option_table, round_solution
from optim.convergence import gamma_changes
from optim.problem import Bools, Floats, Ints, RoundProblem, RoundSolution
from optim.radio.channel import Links
from optim.radio.power_control import Senders, controlled_power

_PROGRESS = 1e-9
# Limits the alternation for extreme numbers.
_TURNS = 50


def paper_allocation(problem: RoundProblem) -> RoundSolution:
    """Sub-2 by alternation: channels by the Hungarian method (eq. 41), then power (eq. 42).

    Sub-1 is already solved: each unit uses the fastest point of its front that C11 allows on the
    channel. As in P3, uploads are planned as if pipelines took no time. The minimised function is
    eq. 35, V·max (upload) plus the drift that depends on channels and power; the reported objective
    uses the sum of pipeline and upload times (eq. 26). S is not part of Sub-2, as eq. 34 charges it
    to every unit; the reported objective charges only scheduled units. Drift ``gamma`` uses
    Y_n·(Γ_n - Γ_idle) in place of Y_n·p_n. docs/explanation/paper.md lists deviations from
    the paper. Precision is not decided: each unit sends its first payload.

    Raises ``InfeasibleRoundError`` like ``option_table``.
    """
    started = perf_counter()
    options = option_table(problem)
    pairs = _PairChoices.of(problem, options)
    turn = pairs.turn(pairs.high_w)
    for _ in range(_TURNS):
        following = pairs.turn(turn.power_w)
        if not turn.cost - following.cost > _PROGRESS * abs(turn.cost):
            break
        turn = following
    units, channels = at = turn.matching.units, turn.matching.channels
    payloads = np.zeros_like(units)
    choice = Choice(units, channels, payloads, pairs.points[at], turn.power_w[at], bound=0.0)
    return round_solution(problem, options, choice, "paper", started)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A matching, the best power of all pairs [N, J] for it, and their cost Υ (eq. 35)."""

    matching: Matching
    power_w: Floats
    cost: float


@dataclass(frozen=True, slots=True)
class _PairChoices:
    """Pairs of a unit and a channel, each with its best point of the front, [N, J].

    Powers of infeasible pairs are undefined.
    """

    problem: RoundProblem
    links: Links
    feasible: Bools
    points: Ints  # indices into the unit's front
    segments: Floats
    low_w: Floats  # C6, C8 and C11 allow powers from low_w to high_w
    high_w: Floats

    @classmethod
    def of(cls, problem: RoundProblem, options: OptionTable) -> "_PairChoices":
        finish, floors = options.finish_s[0], options.floors_w[0]
        points = finish.argmin(axis=0)
        picked = (points, *np.indices(points.shape))
        return cls(
            problem,
            options.pairs.at(0),
            np.isfinite(finish[picked]),
            points,
            np.broadcast_to(options.points.segments, finish.shape)[picked],
            floors[picked],
            options.limits_w[0],
        )

    def turn(self, power_w: Floats) -> _Turn:
        """Choose the best channels for the power, and then the best power for the channels.

        The power is changed on all channels of a unit, within each channel's limits.
        """
        weight = self.problem.options.drift_weight
        matching = match_channels(self.uploads(power_w), self.drift(power_w), weight)
        rows, at = matching.units, (matching.units, matching.channels)
        chosen = controlled_power(self.senders(matching), power_w[at])[:, np.newaxis]
        power_w = power_w.copy()
        power_w[rows] = np.clip(chosen, self.low_w[rows], self.high_w[rows])
        cost = _auxiliary(matching, self.uploads(power_w), self.drift(power_w), weight)
        return _Turn(matching, power_w, cost)

    def uploads(self, power_w: Floats) -> Floats:
        """Seconds of the uploads, [N, J]; infinite if infeasible."""
        return np.where(self.feasible, self.links.uploads(power_w), np.inf)

    def drift(self, power_w: Floats) -> Floats:
        """The drift that each pair adds in Sub-2, [N, J]: Y·p, or Y·(Γ - Γ_idle)."""
        problem, links = self.problem, self.links
        if problem.options.drift == "paper":
            return np.array(problem.queues)[:, np.newaxis] * power_w
        power_w = np.where(self.feasible, power_w, links.max_power_w)
        costs = gamma_changes(power_w, links, self.segments, problem)
        return np.where(self.feasible, costs, 0.0)

    def senders(self, matching: Matching) -> Senders:
        at, options = (matching.units, matching.channels), self.problem.options
        queues = np.array(self.problem.queues)[matching.units]
        paper = options.drift == "paper"
        constant = options.kappa * options.interference_constant_w
        return Senders(
            self.links.at(*at),
            self.low_w[at],
            self.high_w[at],
            watt_price=queues * paper,
            error_price=queues * (0.0 if paper else constant),
            drift_weight=options.drift_weight,
        )


def match_channels(uploads: Floats, drift: Floats, drift_weight: float) -> Matching:
    """Return the largest matching with the least V·max (upload) + Σ drift; both arrays are [N, J].

    Pairs with infinite uploads do not exist. A unit without a channel has the paper's virtual
    channel. Each threshold on the longest upload leaves an assignment problem of the drift alone.
    """
    found = min_cost_matching(np.where(np.isfinite(uploads), drift, np.inf))
    best, least, size = found, math.inf, len(found)
    while size and len(found) == size:
        cost = _auxiliary(found, uploads, drift, drift_weight)
        if cost < least:
            best, least = found, cost
        longest = uploads[found.units, found.channels].max()
        found = min_cost_matching(np.where(uploads < longest, drift, np.inf))
    return best


def _auxiliary(matching: Matching, uploads: Floats, drift: Floats, drift_weight: float) -> float:
    """Return Υ of eq. 35."""
    at = matching.units, matching.channels
    return drift_weight * float(uploads[at].max()) + float(drift[at].sum())
