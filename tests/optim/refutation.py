"""Try to refute a round's lower bound with answers that differ from the given one in one step.

An answer below the bound shows that the bound is wrong. Without such an answer the bound is still
unproved.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.round.problem import Allocation, RoundOptions, RoundProblem, RoundSolution
from optim.verify import radio
from optim.verify import verify_round as verify_constraints
from optim.verify.radio import UplinkPairs
from optim.verify.round import scheduled_units
from optim.verify.tolerance import MARGIN, exceeds, violation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Parts of the largest feasible power. More power lowers Γ; drift ``paper`` may prefer less.
POWER_FRACTIONS = {"gamma": (1.0,), "paper": (1.0, 0.5, 0.25)}


def verify_round(solution: RoundSolution, problem: RoundProblem) -> None:
    """Call ``optim.verify.verify_round``, then try to refute the lower bound."""
    verify_constraints(solution, problem)
    refute_bound(solution, problem)


def refute_bound(solution: RoundSolution, problem: RoundProblem) -> None:
    """Look for a feasible answer below the lower bound, among the neighbours of a feasible one.

    A neighbour gives one unit another power and partition or another free channel, gives its place
    to an idle unit, or swaps the channels of two units.

    Raises ``PlanViolationError`` with the neighbour and its objective.
    """
    bound, choices = solution.certificate.lower_bound, _choices(problem)
    answer = _answer(solution.allocations, problem)
    moves = [_best_move(place, answer, choices) for place in range(len(answer.units))]
    for step, objective in [*moves, _best_swap(answer, choices)]:
        if exceeds(bound, objective):
            raise violation("lower bound", f"{bound:.12g}, but {step} gives {objective:.12g}")


@dataclass(frozen=True, slots=True)
class _Choices:
    """Finish time and drift term of each unit, channel and choice.

    A choice is a power and a point of the front. Both arrays are [N, J, O], and infinite if a
    choice is infeasible.
    """

    finish_s: Floats
    costs: Floats


def _choices(problem: RoundProblem) -> _Choices:
    options, units = problem.options, np.arange(len(problem.uplinks))[:, None, None]
    (latencies, slowest), (segments, counts) = _points(problem)
    finish, costs = [], []
    sent = list(radio.all_pairs(problem))
    for pairs, fraction in itertools.product(sent, POWER_FRACTIONS[options.drift]):
        each, largest = at(pairs, (..., None)), largest_powers(pairs, options)
        power_w = fraction * largest[..., None]
        times = latencies[:, None], slowest[:, None], counts[:, None]
        with np.errstate(invalid="ignore"):  # rate 0, or padding
            seconds = radio.finishes(*times, each, power_w, options)
        seconds[~(np.isfinite(latencies[:, None]) & radio.reached(each))] = math.inf
        if options.hard_gamma:
            late = radio.gammas(each, power_w, segments[:, None], problem) > options.gamma_max
            seconds[late] = math.inf
        finish.append(seconds)
        costs.append(radio.penalties(units, each, power_w, segments[:, None], problem))
    finish_s = np.concatenate(finish, axis=-1)
    drift = np.where(np.isfinite(finish_s), np.concatenate(costs, axis=-1), math.inf)
    return _Choices(finish_s, drift)


def _points(problem: RoundProblem) -> tuple[Floats, Ints]:
    """Return latencies and slowest stages of the fronts' points, [2, N, P], and S and m, [2, N, P].

    Shorter fronts are padded with infinite latencies.
    """
    longest = max(len(front) for front in problem.fronts)
    times = np.zeros((2, len(problem.fronts), longest))
    times[0] = math.inf
    counts = np.ones((2, len(problem.fronts), longest), dtype=np.int64)
    for unit, front in enumerate(problem.fronts):
        for place, point in enumerate(front):
            times[:, unit, place] = point.latency_s, point.slowest_s
            counts[:, unit, place] = point.num_segments, point.num_micro_batches
    return times, counts


@dataclass(frozen=True, slots=True)
class _Answer:
    """Units, channels, finish times and penalties of an answer, [A], and idle penalties, [N]."""

    units: list[int]
    channels: list[int]
    finish_s: Floats
    costs: Floats
    idle_costs: Floats
    drift_weight: float


def _answer(chosen: Sequence[Allocation], problem: RoundProblem) -> _Answer:
    units = scheduled_units(chosen, problem)
    return _Answer(
        units=[given.unit for given in chosen],
        channels=[given.channel for given in chosen],
        finish_s=units.finish_s,
        costs=units.penalties,
        idle_costs=radio.idle_penalties(problem),
        drift_weight=problem.options.drift_weight,
    )


def _best_move(place: int, answer: _Answer, choices: _Choices) -> tuple[str, float]:
    """Return the best replacement of one unit: a new choice or an idle unit, on its channel or a
    free one."""
    num_units, num_channels, _ = choices.finish_s.shape
    units = [answer.units[place], *sorted(set(range(num_units)) - set(answer.units))]
    channels = [answer.channels[place], *sorted(set(range(num_channels)) - set(answer.channels))]
    rest = np.arange(len(answer.units)) != place
    # Sum the other idle units: subtracting one that costs far more than the rest loses digits.
    idle = np.where(np.eye(len(units)), 0.0, answer.idle_costs[units]).sum(axis=1)
    reach = np.ix_(units, channels)
    makespan = np.maximum(choices.finish_s[reach], np.max(answer.finish_s[rest], initial=0.0))
    drift = choices.costs[reach] + np.sum(answer.costs[rest]) + idle[:, None, None]
    objective = _total(answer.drift_weight, makespan, drift)
    unit, channel, _ = np.unravel_index(np.argmin(objective), objective.shape)
    step = f"unit {units[unit]} on channel {channels[channel]} in place of unit {units[0]}"
    return step, float(np.min(objective))


def _best_swap(answer: _Answer, choices: _Choices) -> tuple[str, float]:
    """Return the best swap of two units' channels that does not delay the round."""
    makespan = float(np.max(answer.finish_s))
    cheapest = np.min(np.where(choices.finish_s <= makespan, choices.costs, math.inf), axis=2)
    crossed = cheapest[np.ix_(answer.units, answer.channels)]
    change = crossed + crossed.T - answer.costs[:, None] - answer.costs
    np.fill_diagonal(change, 0.0)
    one, other = np.unravel_index(np.argmin(change), change.shape)
    idle = np.delete(answer.idle_costs, answer.units)
    drift = float(np.sum(answer.costs) + np.sum(idle) + np.min(change))
    step = f"swapping units {answer.units[one]} and {answer.units[other]}"
    return step, answer.drift_weight * makespan + drift


def _total(drift_weight: float, makespan_s: Floats, drift: Floats) -> Floats:
    # An infinite makespan is infeasible even if V = 0.
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(makespan_s), drift_weight * makespan_s + drift, math.inf)


def at(pairs: UplinkPairs, index: Any) -> UplinkPairs:
    """Return the pairs with each array indexed by a NumPy index."""
    return UplinkPairs(*(getattr(pairs, field.name)[index] for field in fields(pairs)))


def largest_powers(pairs: UplinkPairs, options: RoundOptions) -> Floats:
    """Return the largest powers that P^max and the energy allow, within 1e-9 of P^max."""
    powers = pairs.max_power_w.copy()
    scarce = radio.energies(pairs, powers, options) > pairs.energy_j * MARGIN
    if scarce.any():
        powers[scarce] = _bisected(at(pairs, scarce), options)
    return powers


def _bisected(pairs: UplinkPairs, options: RoundOptions) -> Floats:
    low, high = np.zeros_like(pairs.max_power_w), pairs.max_power_w
    for _ in range(30):
        middle = (low + high) / 2
        enough = radio.energies(pairs, middle, options) <= pairs.energy_j * MARGIN
        low, high = np.where(enough, middle, low), np.where(enough, high, middle)
    return low
