"""All options of the units on the channels, as arrays, and the solution for a choice of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate
from collapipe.state import HeadPlace, Payload, Uplink
from optim.latency import streamed_s
from optim.problem import Floats, Ints
from optim.round.channel import Links, links, power_limits
from optim.round.convergence import (
    error_drift,
    gamma_power,
    interference_error,
    round_objective,
    scheduled_gamma,
)
from optim.round.problem import Allocation, RoundProblem, RoundSolution

# Shares of a float32's bits, including the scales of rows.
_PRECISIONS = (("bfloat16", 0.5), ("int8", 0.26), ("int6", 0.2), ("int4", 0.14))
_HEADS: Mapping[HeadPlace | None, int] = {None: 0, "server": 1, "control_unit": 2}
_figures = attrgetter("latency_s", "num_segments", "num_micro_batches", "slowest_s")


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Option (q, i, n, j): unit n trains with the i-th point of its front and uploads its q-th
    payload on channel j."""

    pairs: Links  # [Q, N, J]
    points: "FrontPoints"  # [I, N, 1]
    gradient_errors: Floats  # ρ of a unit's payload, [Q, N, 1]
    error_costs: Floats  # drift that ρ adds, [Q, N, 1]
    limits_w: Floats  # p̄, the highest power, [Q, N, J]; 0 if infeasible at any power
    floors_w: Floats  # the least power that satisfies C11, [Q, I, N, J]; 0 without hard_gamma
    finish_s: Floats  # end of pipeline and upload at p̄, [Q, I, N, J]; infinite if infeasible


@dataclass(frozen=True, slots=True)
class FrontPoints:
    """The points of all N fronts, arrays of shape [I, N, 1]; missing points have infinite latency.

    Times cover a whole round; a is the uplink time of the activations of all its batches.
    """

    latency_s: Floats
    segments: Floats  # S
    num_micro_batches: Floats
    slowest_s: Floats  # slowest stage of a micro-batch; 0 if uploads wait for the pipeline
    first_s: Floats  # below this a, a point with at most as many segments is faster
    last_s: Floats  # above this a, likewise
    heads: Floats  # the head's place as a number of ``_HEADS``

    @classmethod
    def of(cls, problem: RoundProblem) -> "FrontPoints":
        """Collect the points of the problem's fronts."""
        fronts, waits = problem.fronts, problem.options.uplink == "after"
        sizes = np.array([len(front) for front in fronts], dtype=int)
        held = np.arange(sizes.max(initial=0)) < sizes[:, np.newaxis]
        figures = np.zeros((7, *held.shape))
        figures[0], figures[2] = np.inf, 1.0
        points = (
            (*_figures(point), *point.fastest_s, _HEADS[point.head])
            for front in fronts
            for point in front
        )
        # One pass over thousands of points is faster than an array of tuples.
        figures[:, held] = np.fromiter(chain.from_iterable(points), float).reshape(-1, 7).T
        figures[3] *= not waits
        return cls(*figures.transpose(0, 2, 1)[..., np.newaxis])

    def finish(self, activation_s: Floats, model_s: Floats) -> Floats:
        """Finish times in seconds if activations and model take these times on the uplink,
        broadcast."""
        batches = streamed_s(self.latency_s, self.slowest_s, self.num_micro_batches, activation_s)
        return batches + model_s

    def at(self, points: Ints, units: Ints) -> "FrontPoints":
        """Pick the points, [A] each."""
        arrays = (getattr(self, each.name) for each in fields(self))
        return FrontPoints(*(each[points, units, 0] for each in arrays))


def option_table(problem: RoundProblem) -> OptionTable:
    """Return all options of a round of N units and J channels.

    Raises ``InfeasibleRoundError`` if no option is feasible. The message names the first constraint
    that every option violates, the numbers, and a sufficient change.
    """
    options = problem.options
    pairs = links(problem.uplinks, problem.channels, options.fading, options.energy)
    points, (errors, heads) = FrontPoints.of(problem), _of_payloads(problem, len(pairs.gains))
    allowed = errors <= problem.largest_error
    pairs = replace(pairs, max_power_w=np.where(allowed, pairs.max_power_w, 0.0))
    limits = power_limits(pairs)
    of_payloads = limits[:, np.newaxis]
    with np.errstate(invalid="ignore"):
        seconds = (each[:, np.newaxis] for each in pairs.parts(limits))
        possible = (of_payloads > 0) & (points.heads == heads[:, np.newaxis])
        finish = np.where(possible, points.finish(*seconds), np.inf)
    floors = np.zeros(finish.shape)
    if options.hard_gamma:
        each = pairs.at(slice(None), np.newaxis)
        floors = gamma_power(points.segments, each, problem, errors[:, np.newaxis])
        finish = np.where(floors <= of_payloads, finish, np.inf)
    error_costs = error_drift(problem, np.arange(errors.shape[1])[:, np.newaxis], errors)
    table = OptionTable(pairs, points, errors, error_costs, limits, floors, finish)
    if not np.isfinite(finish).any():
        raise InfeasibleRoundError(_reason(problem, table))
    return table


def _of_payloads(problem: RoundProblem, most: int) -> Floats:
    """Return ρ of payloads and their heads' places as numbers, [2, Q, N, 1]; 0 without one."""
    figures = np.zeros((2, most, len(problem.uplinks), 1))
    for unit, uplink in enumerate(problem.uplinks):
        for place, each in enumerate(uplink.payloads):
            figures[:, place, unit, 0] = each.gradient_error, _HEADS[each.head]
    return figures


@dataclass(frozen=True, slots=True)
class Choice:
    """The channel, payload, point of the front and power of each scheduled unit, [A], in the units'
    order.

    ``bound`` is a lower bound of the objective of all choices, up to rounding.
    """

    units: Ints
    channels: Ints
    payloads: Ints
    points: Ints
    powers_w: Floats
    bound: float


def round_solution(
    problem: RoundProblem, options: OptionTable, choice: Choice, solver: str, started: float
) -> RoundSolution:
    """Make a solver's answer from a choice; ``started`` is ``perf_counter`` at the solver's
    start."""
    units, channels, powers = choice.units, choice.channels, choice.powers_w
    chosen = options.pairs.at(choice.payloads, units, channels)
    finish = options.points.at(choice.points, units).finish(*chosen.parts(powers))
    picked = units, choice.points, choice.payloads
    figures = channels, powers, chosen.uploads(powers), finish
    rows = zip(*(each.tolist() for each in (*picked, *figures)), strict=True)
    allocations = tuple(
        Allocation(
            *(unit, channel, power, upload, done),
            problem.fronts[unit][point],
            _payload(problem.uplinks[unit], payload),
        )
        for unit, point, payload, channel, power, upload, done in rows
    )
    objective = round_objective(problem, allocations)
    lower, elapsed = min(choice.bound, objective), perf_counter() - started
    return RoundSolution(allocations, Certificate(objective, lower, solver, elapsed))


def _payload(uplink: Uplink, place: int) -> Payload | None:
    return uplink.payloads[place] if uplink.payloads else None


def _reason(problem: RoundProblem, options: OptionTable) -> str:
    holding = [unit for unit, front in enumerate(problem.fronts) if front]
    if not problem.uplinks:
        return "the round has no units; describe at least one cluster"
    if not problem.channels:
        return (
            "the round has no channels (C4), so that no unit can upload; describe at least one "
            "under channels"
        )
    if not holding:
        return (
            f"none of {len(problem.fronts)} clusters can hold the model's {problem.num_blocks} "
            "blocks (C7, C9); lower model.num_blocks, raise memory or energy, or "
            "train fewer weights (LoRA)"
        )
    if not options.limits_w[:, holding].any():
        return _upload(problem, options.pairs, holding)
    return _gamma(problem, options)


def _upload(problem: RoundProblem, pairs: Links, holding: list[int]) -> str:
    """Explain that C6 or C8 fails, by the pair and payload whose energy comes nearest."""
    reachable = (pairs.max_power_w > 0) & (pairs.snr_per_watt > 0)
    budgets = np.where(reachable, pairs.budgets, -1.0)[:, holding]
    payload, place, channel = (int(i) for i in np.unravel_index(budgets.argmax(), budgets.shape))
    unit = holding[place]
    uplink, at = problem.uplinks[unit], (payload, unit, channel)
    if not reachable[at]:
        return (
            "no unit reaches a channel (C6): everywhere max_power_w or the gain is 0; raise "
            f"{problem.called(unit)}'s max_power_w={uplink.max_power_w:g} or its gains"
        )
    joule_per_bit = math.log(2) / float(pairs.snr_per_watt[at])
    joule_per_bit /= problem.channels[channel].bandwidth_hz
    bits, payable = float(pairs.paid_bits[at]), uplink.energy_j / joule_per_bit
    offered, most = uplink.payloads, problem.largest_error
    sent = uplink.sending(_payload(uplink, payload))
    fewer = _payable(sent, bits, payable, bool(offered)) if payable >= 1 else ""
    ways = f"{fewer}or raise energy_j" if fewer else "raise energy_j"
    if any(each.gradient_error > most for each in offered):
        ways += f", or error_budget={most:g}, which forbids fewer bits"
    return (
        f"no unit can afford its upload (C8): {problem.called(unit)} on channel {channel} comes "
        f"nearest, where {bits:.4g} bits cost more than {bits * joule_per_bit:.4g} J at any power "
        f"and energy_j is {uplink.energy_j:.4g}; {ways}"
    )


def _payable(uplink: Uplink, bits: float, payable: float, smallest: bool) -> str:
    """Describe how a unit could send fewer bits, if its energy pays for fewer than ``payable``.
    ``smallest`` means that the unit may choose its precisions, and even the smallest is too
    large."""
    left = payable - uplink.model_bits
    if bits == uplink.model_bits or left <= 0:
        return f"send fewer than {payable:.4g} bits (LoRA, fewer bits a parameter) "
    share = left / uplink.activation_bits
    if smallest:
        return (
            f"even in the fewest bits that it may send less than {share:.0%} of the activations "
            "are feasible: take fewer local steps, send none with the head on the control unit, "
            "count the model's bits alone (energy=adapters), "
        )
    names = (name for name, part in _PRECISIONS if part < share)
    fewer = next((f", such as {name} instead of float32" for name in names), "")
    return (
        f"the model's {uplink.model_bits:.4g} of them and less than {share:.0%} of the others "
        f"are feasible: send activations in fewer bits{fewer}, or none with the head on the "
        "control unit, count the model's alone (energy=adapters), "
    )


def _gamma(problem: RoundProblem, options: OptionTable) -> str:
    """Explain that C11 fails, by the option with the least Γ."""
    pairs, constant = options.pairs, problem.options.interference_constant_w
    with np.errstate(divide="ignore"):
        error = interference_error(options.limits_w, pairs.gains, pairs.interference_w, constant)
    gammas = scheduled_gamma(
        options.points.segments,
        error[:, np.newaxis],
        problem.num_blocks,
        problem.options,
        options.gradient_errors[:, np.newaxis],
    )
    limits = np.broadcast_to(options.limits_w[:, np.newaxis], gammas.shape)
    possible = np.isfinite(options.points.latency_s) & (limits > 0)
    nearest = np.unravel_index(np.where(possible, gammas, math.inf).argmin(), gammas.shape)
    _, point, unit, channel = nearest
    least = f"Γ = {gammas[nearest]:.4g} at S = {options.points.segments[point, unit, 0]:g}"
    return (
        f"no unit keeps Γ within gamma_max={problem.options.gamma_max:.4g} (C11): "
        f"{problem.called(int(unit))} on channel {channel} comes nearest with {least} and "
        f"{limits[nearest]:.4g} W; raise gamma_max above that, or turn hard_gamma off"
    )
