"""The effect of a round's choices on convergence: Γ (eq. 28) and the virtual queues (eq. 29)."""

import math
from collections.abc import Sequence

import numpy as np

from collapipe.errors import ConfigError
from collapipe.state import Channel
from optim.problem import Floats, Ints
from optim.round.channel import Links
from optim.round.problem import Allocation, RoundOptions, RoundProblem

# Γ may exceed Γ^max by this relative rounding error.
_ROUNDING = 1e-12


def interference_error(
    power_w: Floats | float, gain: Floats | float, interference_w: Floats | float, constant_w: float
) -> Floats:
    """Return ε(p) = C/(p·h + I) of eq. (25), broadcast; 0 for C = 0.

    The sign of I in the paper is wrong, because more interference must not reduce the error. It is
    kept because Γ uses it. Therefore ε can compare powers, but not channels
    (docs/explanation/paper.md).
    """
    received = np.asarray(power_w * np.asarray(gain) + interference_w, dtype=np.float64)
    return constant_w / received if constant_w else np.zeros_like(received)


def scheduled_gamma(
    num_segments: Floats | int,
    error: Floats,
    num_blocks: int,
    options: RoundOptions,
    gradient_error: Floats | float = 0.0,
) -> Floats:
    """Return Γ = κ·(φ²·(S²/L + 1 + ρ) + ε(p)), broadcast, for ``error`` = ε(p); eq. (28) has ρ = 0.

    S²/L is part of it only with ``segment_price`` ``paper``.

    ``gradient_error`` is ρ, the second moment that rounding adds to the gradient, relative to φ².
    Unbiased rounding leaves the gradient unbiased to first order, so ρφ² adds to φ² in eq. (23)
    (docs/explanation/paper.md).

    S²/L comes from Lemma 1, which does not hold as printed (docs/explanation/paper.md). It is a
    price on segments. It does not bound the gradient, which is equal for every S.
    """
    priced = options.segment_price == "paper"
    split = options.gradient_bound * np.square(num_segments) / num_blocks * priced
    noise = options.gradient_bound * (1.0 + np.asarray(gradient_error))
    return np.asarray(options.kappa * (split + error + noise))


def gamma_changes(
    power_w: Floats,
    pairs: Links,
    num_segments: Floats,
    problem: RoundProblem,
    gradient_error: Floats | float = 0.0,
) -> Floats:
    """Return Y_n·(Γ - Γ_idle), the change of the drift by scheduling, broadcast over [..., N, J].

    Values of infeasible pairs, which receive nothing, are infinite or NaN.
    """
    options, constant = problem.options, problem.options.interference_constant_w
    with np.errstate(divide="ignore", invalid="ignore"):
        error = interference_error(power_w, pairs.gains, pairs.interference_w, constant)
        gammas = scheduled_gamma(num_segments, error, problem.num_blocks, options, gradient_error)
        changes = gammas - idle_gamma(problem.channels, options)
        return np.asarray(np.array(problem.queues)[:, np.newaxis] * changes)


def idle_gamma(channels: Sequence[Channel], options: RoundOptions) -> float:
    """Return Γ of an unscheduled unit, κ·(C/I + φ²): p = 0, S = 0, I the mean of the channels' I_j.

    Raises ``ConfigError`` if I is 0, which makes Γ infinite.
    """
    interference = math.fsum(channel.interference_w for channel in channels) / len(channels)
    if options.interference_constant_w and not interference:
        raise ConfigError(
            f"channel.interference_constant_w={options.interference_constant_w:g} with "
            "interference_w=0 on every channel: the drift of an idle unit is infinite; "
            "set the constant to 0, or interference_w above 0"
        )
    error = interference_error(0.0, 0.0, interference, options.interference_constant_w)
    return options.kappa * (float(error) + options.gradient_bound)


def gamma_power(
    num_segments: Floats, pairs: Links, problem: RoundProblem, gradient_error: Floats | float = 0.0
) -> Floats:
    """Return the least p ≥ 0 with Γ ≤ Γ^max (C11), broadcast, in W; infinite without such p."""
    options = problem.options
    limit = options.gamma_max * (1 + _ROUNDING)
    no_error = np.zeros(pairs.gains.shape)
    fixed = scheduled_gamma(num_segments, no_error, problem.num_blocks, options, gradient_error)
    constant = options.kappa * options.interference_constant_w
    if not constant:
        return np.where(fixed <= limit, 0.0, math.inf)
    with np.errstate(divide="ignore"):
        power = (constant / (limit - fixed) - pairs.interference_w) / pairs.gains
    return np.where(fixed < limit, np.maximum(power, 0.0), math.inf)


def round_gammas(problem: RoundProblem, allocations: Sequence[Allocation]) -> tuple[float, ...]:
    """Return Γ_n of all N units (eq. 28); units without an allocation have ``idle_gamma``."""
    gammas = [idle_gamma(problem.channels, problem.options)] * len(problem.uplinks)
    for each in allocations:
        error = interference_error(
            each.power_w,
            problem.uplinks[each.unit].gains[each.channel],
            problem.channels[each.channel].interference_w,
            problem.options.interference_constant_w,
        )
        segments = each.partition.num_segments
        gamma = scheduled_gamma(
            segments, error, problem.num_blocks, problem.options, each.gradient_error
        )
        gammas[each.unit] = float(gamma)
    return tuple(gammas)


def round_objective(problem: RoundProblem, allocations: Sequence[Allocation]) -> float:
    """Return V·max(finish) of the scheduled units plus the drift of the queues.

    The drift is Σ Y_n·Γ_n over all N units, or Σ Y_n·(S_n + p_n) over the scheduled units
    (eq. 32), plus the drift of the rounding-error queues Q_n.
    """
    makespan, queues = max(each.finish_s for each in allocations), problem.queues
    drift: float
    if problem.options.drift == "paper":
        drift = sum(queues[a.unit] * (a.partition.num_segments + a.power_w) for a in allocations)
    else:
        gammas = round_gammas(problem, allocations)
        drift = sum(queue * gamma for queue, gamma in zip(queues, gammas, strict=True))
    drift += sum(float(error_drift(problem, a.unit, a.gradient_error)) for a in allocations)
    return problem.options.drift_weight * makespan + drift


def error_drift(problem: RoundProblem, unit: Ints | int, gradient_error: Floats | float) -> Floats:
    """Return ½(Q_n(t+1)² - Q_n'(t+1)²), the drift that ρ_n adds, broadcast; Q_n' has ρ_n = 0.

    This is the exact drift instead of the usual bound Q_n·ρ_n/ρ̄. At Q_n = 0 that bound charges
    nothing, even for an error that takes many rounds to repay. The result is 0 if no queues are
    kept.
    """
    if not problem.error_queues:
        return np.zeros(np.broadcast_shapes(np.shape(unit), np.shape(gradient_error)))
    queue = np.array(problem.error_queues, dtype=np.float64)[unit]
    after, spared = (
        np.maximum(queue + np.asarray(spent) / problem.options.error_budget - 1.0, 0.0)
        for spent in (gradient_error, 0.0)
    )
    return np.asarray((np.square(after) - np.square(spared)) / 2)


def next_queues(
    queues: Sequence[float], gammas: Sequence[float], gamma_max: float
) -> tuple[float, ...]:
    """Return Y_n(t+1) = max(Y_n(t) + Γ_n(t) - Γ^max, 0) of eq. (29)."""
    return tuple(
        max(queue + gamma - gamma_max, 0.0) for queue, gamma in zip(queues, gammas, strict=True)
    )


def next_error_queues(
    problem: RoundProblem, allocations: Sequence[Allocation]
) -> tuple[float, ...]:
    """Return Q_n(t+1) = max(Q_n(t) + ρ_n/ρ̄ - 1, 0). Bounded queues keep the mean of ρ_n at ρ̄ or
    below."""
    errors, queues = {each.unit: each.gradient_error for each in allocations}, problem.error_queues
    budget = problem.options.error_budget
    spent = [errors.get(unit, 0.0) / budget for unit in range(len(queues))]
    return next_queues(queues, spent, 1.0)
