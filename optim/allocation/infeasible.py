"""Why no unit can be scheduled, and what would be enough."""

import math

import numpy as np

from collapipe.errors import InfeasibleRoundError
from optim.allocation.options import OptionTable
from optim.convergence import interference_error, scheduled_gamma
from optim.problem import RoundProblem


def infeasible_round(problem: RoundProblem, options: OptionTable) -> InfeasibleRoundError:
    """The error of a round without a feasible option: names the first constraint nobody meets."""
    holding = [unit for unit, front in enumerate(problem.fronts) if front]
    if not problem.uplinks:
        return InfeasibleRoundError("the round has no units; describe at least one cluster")
    if not problem.channels:
        return InfeasibleRoundError(
            "the round has no channels (C4), so that no unit can upload; describe at least one "
            "under channels"
        )
    if not holding:
        return InfeasibleRoundError(
            f"none of {len(problem.fronts)} clusters can hold the model's {problem.num_blocks} "
            "blocks (C7, C9); lower model.num_blocks, raise memory or energy, or use LoRA"
        )
    if not options.limits_w[holding].any():
        return InfeasibleRoundError(_upload(problem, options, holding))
    return InfeasibleRoundError(_gamma(problem, options))


def _upload(problem: RoundProblem, options: OptionTable, holding: list[int]) -> str:
    """C6 or C8: the pair that comes nearest to its energy."""
    pairs = options.pairs
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
