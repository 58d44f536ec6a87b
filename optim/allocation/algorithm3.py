"""Algorithm 3 of CollaPipe (arXiv 2509.19855): channels and power in turn, S and m given."""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from collapipe.plan import Certificate
from optim.allocation.infeasible import infeasible_round
from optim.allocation.matching import Matching, min_cost_matching, missing_cost
from optim.allocation.objective import round_objective
from optim.allocation.options import OptionTable, option_table
from optim.convergence import idle_gamma, interference_error, scheduled_gamma
from optim.problem import Allocation, Bools, Floats, Ints, RoundProblem, RoundSolution
from optim.radio.channel import uplink_rate, upload_time
from optim.radio.power_control import Senders, controlled_power

_PROGRESS = 1e-9
# Extreme figures must not keep the turns going.
_TURNS = 50


def paper_allocation(problem: RoundProblem) -> RoundSolution:
    """Sub-2 by alternation: channels by the Hungarian method (eq. 41), then power (eq. 42).

    Each unit brings the fastest point of its front: Sub-1 was solved before, and for itself. As in
    P3 the uploads are planned as if the pipelines took no time: what is minimised is eq. 35,
    V·max (upload) + what of the drift depends on channels and power, while the objective that is
    reported has the sum of pipeline and upload (eq. 26). Where the paper is silent or slips:

    - Eqs. 40 and 41 sum the uploads; eq. 35's longest counts here. Eq. 41 also has Y_n·p_n within
      the rate's denominator. For eq. 42 to 44 see ``controlled_power``.
    - p⁽⁰⁾ is the largest power of each pair. A pair that is infeasible at any power is left out,
      and as many units are scheduled as the others allow.
    - "Until Y_n stabilizes" is read as: until eq. 35 falls no more. Queues change once a round.
    - Y_n·S_n stays out of Sub-2, since eq. 34 charges it to every unit; the objective that is
      reported charges the scheduled ones, so that this way pays where fronts differ in S.
    - Drift ``gamma`` puts Y_n·(Γ_n - Γ_idle) for Y_n·p_n.
    - C11, where asked for, takes the fastest point that it allows on that channel.

    Raises ``InfeasibleRoundError`` where no unit can be scheduled.
    """
    started = perf_counter()
    pairs = _pairs(problem, option_table(problem))
    allocations = _allocations(problem, pairs, _alternate(problem, pairs))
    return RoundSolution(
        allocations,
        Certificate(round_objective(problem, allocations), 0.0, "paper", perf_counter() - started),
    )


@dataclass(frozen=True, slots=True)
class _PairChoices:
    """All pairs of a unit and a channel, each with the point of the front that it would take.

    ``points`` are places in the unit's front; ``low_w`` … ``high_w`` is the power that C6, C8 and
    C11 allow. All are [N, J]; powers of infeasible pairs mean nothing.
    """

    options: OptionTable
    feasible: Bools
    points: Ints
    segments: Floats
    low_w: Floats
    high_w: Floats

    def uploads(self, power_w: Floats) -> Floats:
        """Seconds, [N, J]; infinite where infeasible."""
        links = self.options.pairs
        rates = uplink_rate(power_w, links.gains, links.bandwidth_hz, links.noise_w, links.fading)
        return np.where(self.feasible, upload_time(links.upload_bits, rates), np.inf)


def _pairs(problem: RoundProblem, options: OptionTable) -> _PairChoices:
    if not np.isfinite(options.finish_s).any():
        raise infeasible_round(problem, options)
    points = options.finish_s.argmin(axis=0)
    picked = (points, *np.indices(points.shape))
    return _PairChoices(
        options=options,
        feasible=np.isfinite(options.finish_s[picked]),
        points=points,
        segments=np.broadcast_to(options.segments, options.finish_s.shape)[picked],
        low_w=options.floors_w[picked],
        high_w=options.limits_w,
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """A matching, the power of all pairs [N, J] that then suits it, and eq. 35's Υ of both."""

    matching: Matching
    power_w: Floats
    cost: float


def _alternate(problem: RoundProblem, pairs: _PairChoices) -> _Turn:
    turn = _turn(problem, pairs, pairs.high_w)
    for _ in range(_TURNS):
        following = _turn(problem, pairs, turn.power_w)
        if not turn.cost - following.cost > _PROGRESS * abs(turn.cost):
            break
        turn = following
    return turn


def _turn(problem: RoundProblem, pairs: _PairChoices, power_w: Floats) -> _Turn:
    weight = problem.options.drift_weight
    matching = match_channels(pairs.uploads(power_w), _drift(problem, pairs, power_w), weight)
    power_w = _controlled(problem, pairs, matching, power_w)
    uploads, drift = pairs.uploads(power_w), _drift(problem, pairs, power_w)
    return _Turn(matching, power_w, _auxiliary(matching, uploads, drift, weight))


def match_channels(uploads: Floats, drift: Floats, drift_weight: float) -> Matching:
    """The largest matching with the least V·max (upload) + Σ drift; both arrays are [N, J].

    An infinite upload: no pair. Whoever has no channel has the paper's virtual one. The longest
    upload is a threshold: below each there is an assignment problem of the drift alone.
    """
    possible = np.isfinite(uploads)
    missing = missing_cost(np.where(possible, drift, 0.0), min(drift.shape))
    found = min_cost_matching(np.where(possible, drift, missing), missing)
    best, least, size = found, math.inf, len(found)
    while size and len(found) == size:
        cost = _auxiliary(found, uploads, drift, drift_weight)
        if cost < least:
            best, least = found, cost
        longest = uploads[found.units, found.channels].max()
        found = min_cost_matching(np.where(uploads < longest, drift, missing), missing)
    return best


def _auxiliary(matching: Matching, uploads: Floats, drift: Floats, drift_weight: float) -> float:
    """Υ of eq. 35."""
    at = matching.units, matching.channels
    return drift_weight * float(uploads[at].max()) + float(drift[at].sum())


def _drift(problem: RoundProblem, pairs: _PairChoices, power_w: Floats) -> Floats:
    """What of the drift a pair adds in Sub-2, [N, J]: Y·p, or Y·(Γ - Γ_idle)."""
    queues, options = np.array(problem.queues)[:, np.newaxis], problem.options
    if options.drift == "paper":
        return queues * power_w
    links = pairs.options.pairs
    power_w = np.where(pairs.feasible, power_w, links.max_power_w)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = interference_error(
            power_w, links.gains, links.interference_w, options.interference_constant_w
        )
        gamma = scheduled_gamma(pairs.segments, error, problem.num_blocks, options)
        costs = queues * (gamma - idle_gamma(problem.channels, options))
    return np.where(pairs.feasible, costs, 0.0)


def _controlled(
    problem: RoundProblem, pairs: _PairChoices, matching: Matching, power_w: Floats
) -> Floats:
    """Power of all pairs, [N, J], once that of the matched units is controlled.

    A unit keeps its power on every channel, as far as the channel allows it.
    """
    at = matching.units, matching.channels
    chosen = controlled_power(_senders(problem, pairs, matching), power_w[at])
    kept = power_w.copy()
    rows = matching.units
    kept[rows] = np.clip(chosen[:, np.newaxis], pairs.low_w[rows], pairs.high_w[rows])
    return kept


def _senders(problem: RoundProblem, pairs: _PairChoices, matching: Matching) -> Senders:
    links, options = pairs.options.pairs, problem.options
    at = matching.units, matching.channels
    queues = np.array(problem.queues)[matching.units]
    paper = options.drift == "paper"
    constant = options.kappa * options.interference_constant_w
    return Senders(
        gains=links.gains[at],
        bandwidth_hz=links.bandwidth_hz[matching.channels],
        interference_w=links.interference_w[matching.channels],
        noise_w=links.noise_w[matching.channels],
        upload_bits=links.upload_bits[matching.units, 0],
        low_w=pairs.low_w[at],
        high_w=pairs.high_w[at],
        watt_price=queues * paper,
        error_price=queues * (0.0 if paper else constant),
        drift_weight=options.drift_weight,
        fading=links.fading,
    )


def _allocations(problem: RoundProblem, pairs: _PairChoices, turn: _Turn) -> tuple[Allocation, ...]:
    uploads, matched = pairs.uploads(turn.power_w), turn.matching
    return tuple(
        Allocation(
            unit=unit,
            channel=channel,
            power_w=float(turn.power_w[unit, channel]),
            upload_s=float(uploads[unit, channel]),
            partition=problem.fronts[unit][int(pairs.points[unit, channel])],
        )
        for unit, channel in zip(matched.units.tolist(), matched.channels.tolist(), strict=True)
    )
