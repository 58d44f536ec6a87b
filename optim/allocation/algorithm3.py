"""Algorithm 3 of CollaPipe (arXiv 2509.19855): alternate channels and power for given S and m.

Power is controlled by Dinkelbach's transform and convex approximation (eq. 42).
"""

import math
import warnings
from dataclasses import dataclass
from time import perf_counter

import cvxpy as cp
import numpy as np

from optim.allocation.matching import Matching, min_cost_matching
from optim.allocation.options import Choice, OptionTable, option_table, round_solution
from optim.problem import Bools, Floats, Ints
from optim.round.channel import Links, mean_nats_and_shortfall
from optim.round.convergence import gamma_changes
from optim.round.problem import RoundProblem, RoundSolution

# Relative precision of the alternation, and of the conic solver.
_PROGRESS = 1e-9
# Limits the alternation for extreme numbers.
_TURNS = 50
_ITERATIONS = 50
_HALVINGS = 20
# Signal-to-noise ratios at full power are clipped to this range in the approximation of r.
_BENDS = (1.0, 1e4)


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
    """Pairs of a unit and a channel, [N, J], with the best point; power undefined if infeasible."""

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

    def senders(self, matching: Matching) -> "Senders":
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


@dataclass(frozen=True, slots=True)
class Senders:
    """The A units with a channel, and the cost of their power; all arrays are [A]."""

    links: Links
    low_w: Floats  # C6, C8 and C11 allow powers from low_w to high_w > 0
    high_w: Floats
    watt_price: Floats  # drift per watt: Y of drift ``paper``
    error_price: Floats  # drift per unit of 1/(p·h + I): Y·κ·C of drift ``gamma``
    drift_weight: float

    def errors(self, power_w: Floats) -> Floats:
        """Return 1/(p·h + I), or 0 if its price is 0."""
        received = power_w * self.links.gains + self.links.interference_w
        return np.divide(1.0, received, out=np.zeros_like(received), where=self.error_price > 0)

    def cost(self, power_w: Floats) -> float:
        """Return Υ(p) of eq. 35: V times the longest upload, plus the drift that depends on p."""
        drift = self.watt_price @ power_w + self.error_price @ self.errors(power_w)
        return float(self.drift_weight * self.links.uploads(power_w).max() + drift)


def controlled_power(senders: Senders, power_w: Floats) -> Floats:
    """Return the power [A], W, that minimises ``Senders.cost``, from a feasible start.

    Each step solves a convex programme at the current p and moves towards its solution as long as
    the cost falls. The cost is convex, so the iteration approaches its minimum; of 136 random
    rounds, 132 reached it within 1e-6, the others within 0.2 % after 50 steps. With λ the longest
    upload (Dinkelbach's parameter), the programme is

        min V·t + Σ price·p   with   t ≥ λ + (z + θ - λ·r(p)) / r(p_now)   for each unit.

    Eqs. 42 to 44 are read differently (docs/explanation/paper.md): division by r(p_now) turns bits
    into seconds, t bounds each unit instead of the sum, and C8 and C11 are exact limits instead of
    tangents.
    Two functions are approximated: r, under fading or at extreme values, by a logarithm with its
    value and slope at p_now, and the drift ``gamma`` by its tangent (g_1 and g_2 of eq. 44).
    """
    programme = _Programme(senders)
    cost = senders.cost(power_w)
    for _ in range(_ITERATIONS):
        step = programme.solve(power_w) - power_w
        nearer = (power_w + step / 2**halving for halving in range(_HALVINGS))
        reached = next((each for each in nearer if senders.cost(each) < cost), None)
        if reached is None:
            break
        power_w, before, cost = reached, cost, senders.cost(reached)
        if before - cost <= _PROGRESS * abs(cost):
            break
    return power_w


class _Programme:
    """The convex programme, compiled once, for any p_now.

    Quantities are scaled for the solver: p by its upper limit, t by λ, prices by the largest price.
    """

    def __init__(self, senders: Senders) -> None:
        size, snr = senders.low_w.size, senders.links.snr_per_watt * senders.high_w
        self._senders, self._bend = senders, np.clip(snr, *_BENDS)
        self._share = cp.Variable(size, bounds=[senders.low_w / senders.high_w, 1])
        longest = cp.Variable(nonneg=True)
        self._steepness, self._level = cp.Parameter(size, nonneg=True), cp.Parameter(size)
        self._delay_price, self._prices = cp.Parameter(nonneg=True), cp.Parameter(size)
        carried = cp.multiply(self._steepness, cp.log(1 + cp.multiply(self._bend, self._share)))
        self._problem = cp.Problem(
            cp.Minimize(self._delay_price * longest + self._prices @ self._share),
            [longest + carried >= self._level],
        )

    def solve(self, power_w: Floats) -> Floats:
        """Return the solution at p_now, or p_now if the problem is too badly scaled to solve."""
        self._centre(power_w)
        try:
            with warnings.catch_warnings():  # inexact answers suffice: each step's cost is checked
                warnings.simplefilter("ignore")
                self._problem.solve(solver=cp.CLARABEL)
        except cp.SolverError:
            return power_w
        share: Floats = self._share.value
        limits = self._senders.low_w, self._senders.high_w
        return np.asarray(np.clip(share * self._senders.high_w, *limits))

    def _centre(self, power_w: Floats) -> None:
        senders, seconds = self._senders, self._senders.links.uploads(power_w)
        bent, slope = self._bend * power_w / senders.high_w, _elasticity(senders.links, power_w)
        steepness = np.divide(slope * (1 + bent), bent, out=np.zeros_like(bent), where=bent > 0)
        delay, errors = senders.drift_weight * seconds.max(), senders.errors(power_w)
        # The drift over the whole range of each power, at its slope at p.
        slopes = senders.watt_price - senders.error_price * senders.links.gains * errors**2
        prices = slopes * senders.high_w
        largest = max(delay, np.abs(prices).max()) or 1.0
        self._steepness.value = steepness
        self._level.value = seconds / (seconds.max() or 1.0) + steepness * np.log1p(bent)
        self._delay_price.value, self._prices.value = delay / largest, prices / largest


def _elasticity(links: Links, power_w: Floats) -> Floats:
    """Return d ln r / d ln p, 0 … 1; 0 at power 0."""
    snr = links.snr_per_watt * power_w
    if links.fading == "rayleigh":
        nats, rise = mean_nats_and_shortfall(snr)
    else:
        nats, rise = np.log1p(snr), snr / (1 + snr)
    return np.divide(rise, nats, out=np.zeros_like(snr), where=nats > 0)
