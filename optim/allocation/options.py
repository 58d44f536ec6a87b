"""What each unit could do on each channel, as arrays, and a choice of them as an answer."""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate
from optim.convergence import gamma_power, interference_error, round_objective, scheduled_gamma
from optim.problem import Allocation, Floats, Ints, Partition, RoundProblem, RoundSolution
from optim.radio.channel import Links, links, power_limits


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Option (s, n, j): unit n trains with the s-th point of its front and uploads on channel j."""

    pairs: Links
    latency_s: Floats  # of the fronts' points, [S, N, 1]; infinite where a front has fewer
    segments: Floats  # of the same, 0 where a front has fewer
    limits_w: Floats  # p̄, the highest power, [N, J]; 0 where the pair is infeasible at any power
    floors_w: Floats  # the least power that keeps C11, [S, N, J]; zeros where it is not asked
    uploads_s: Floats  # at p̄, [N, J]; infinite where the pair is infeasible
    finish_s: Floats  # pipeline and upload at p̄, [S, N, J]; infinite where infeasible


def option_table(problem: RoundProblem) -> OptionTable:
    """All options of a round of N units and J channels.

    Raises ``InfeasibleRoundError`` where none is feasible: names the first constraint that nobody
    meets, the numbers, and what would be enough.
    """
    pairs = links(problem.uplinks, problem.channels, problem.options.fading)
    limits = power_limits(pairs)
    uploads = np.where(limits > 0, pairs.uploads(limits), np.inf)
    latency, segments = _points(problem.fronts)
    finish, floors = latency + uploads, np.zeros(latency.shape[:2] + limits.shape[1:])
    if problem.options.hard_gamma:
        floors = gamma_power(segments, pairs, problem)
        finish = np.where(floors <= limits, finish, np.inf)
    options = OptionTable(pairs, latency, segments, limits, floors, uploads, finish)
    if not np.isfinite(finish).any():
        raise InfeasibleRoundError(_reason(problem, options))
    return options


def _points(fronts: tuple[tuple[Partition, ...], ...]) -> tuple[Floats, Floats]:
    """Latencies and S of the fronts, [S, N, 1] each."""
    most = max(map(len, fronts), default=0)
    latency = np.full((len(fronts), most), np.inf)
    segments = np.zeros((len(fronts), most))
    for unit, front in enumerate(fronts):
        latency[unit, : len(front)] = [point.latency_s for point in front]
        segments[unit, : len(front)] = [point.num_segments for point in front]
    return latency.T[:, :, np.newaxis], segments.T[:, :, np.newaxis]


@dataclass(frozen=True, slots=True)
class Choice:
    """Of each scheduled unit its channel, point of the front and power, [A], in the units' order.

    ``bound``: no choice has a lower objective, up to rounding.
    """

    units: Ints
    channels: Ints
    points: Ints
    powers_w: Floats
    bound: float


def round_solution(
    problem: RoundProblem, options: OptionTable, choice: Choice, solver: str, started: float
) -> RoundSolution:
    """The choice as a solver's answer; ``started`` is the performance counter at the beginning."""
    units, channels, powers = choice.units, choice.channels, choice.powers_w
    uploads = options.pairs.at(units, channels).uploads(powers)
    columns = (units, channels, powers, uploads, choice.points)
    allocations = tuple(
        Allocation(unit, channel, power, upload, problem.fronts[unit][point])
        for unit, channel, power, upload, point in zip(*(c.tolist() for c in columns), strict=True)
    )
    objective = round_objective(problem, allocations)
    lower, elapsed = min(choice.bound, objective), perf_counter() - started
    return RoundSolution(allocations, Certificate(objective, lower, solver, elapsed))


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
            "blocks (C7, C9); lower model.num_blocks, raise memory or energy, or use LoRA"
        )
    if not options.limits_w[holding].any():
        return _upload(problem, options.pairs, holding)
    return _gamma(problem, options)


def _upload(problem: RoundProblem, pairs: Links, holding: list[int]) -> str:
    """C6 or C8: the pair that comes nearest to its energy."""
    heard = (pairs.max_power_w > 0) & (pairs.snr_per_watt > 0)
    budgets = np.where(heard, pairs.budgets, -1.0)
    nearest = int(budgets[holding].argmax())
    unit, channel = holding[nearest // len(problem.channels)], nearest % len(problem.channels)
    uplink = problem.uplinks[unit]
    if not heard[unit, channel]:
        return (
            "no unit reaches a channel (C6): everywhere max_power_w or the gain is 0; raise "
            f"unit {unit}'s max_power_w={uplink.max_power_w:g} or its gains"
        )
    joule_per_bit = math.log(2) / float(pairs.snr_per_watt[unit, channel])
    joule_per_bit /= problem.channels[channel].bandwidth_hz
    needed, payable = uplink.model_bits * joule_per_bit, uplink.energy_j / joule_per_bit
    return (
        f"no unit can afford its upload (C8): unit {unit} on channel {channel} comes nearest, "
        f"where {uplink.model_bits:.4g} bits cost more than {needed:.4g} J at any power and "
        f"energy_j is {uplink.energy_j:.4g}; send fewer than {payable:.4g} bits (LoRA, fewer bits "
        "a parameter) or raise energy_j"
    )


def _gamma(problem: RoundProblem, options: OptionTable) -> str:
    """C11: the option with the least Γ."""
    pairs, constant = options.pairs, problem.options.interference_constant_w
    with np.errstate(divide="ignore"):
        error = interference_error(options.limits_w, pairs.gains, pairs.interference_w, constant)
    gammas = scheduled_gamma(options.segments, error, problem.num_blocks, problem.options)
    possible = np.isfinite(options.latency_s) & (options.limits_w > 0)
    gammas = np.where(possible, gammas, math.inf)
    point, unit, channel = np.unravel_index(gammas.argmin(), gammas.shape)
    least = f"Γ = {gammas[point, unit, channel]:.4g} at S = {options.segments[point, unit, 0]:g}"
    return (
        f"no unit keeps Γ within gamma_max={problem.options.gamma_max:.4g} (C11): unit "
        f"{unit} on channel {channel} comes nearest with {least} and "
        f"{options.limits_w[unit, channel]:.4g} W; raise gamma_max above that, or turn hard_gamma "
        "off"
    )
