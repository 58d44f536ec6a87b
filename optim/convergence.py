"""How a round's choices slow convergence down: Γ, the queues that hold it back, Theorem 1."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError
from collapipe.state import Channel
from optim.problem import Allocation, RoundOptions, RoundProblem

Floats = NDArray[np.float64]

# Γ may exceed Γ^max by this, relative: by rounding, not by choice.
_ROUNDING = 1e-12


def interference_error(
    power_w: Floats | float, gain: Floats | float, interference_w: Floats | float, constant_w: float
) -> Floats:
    """ε(p) = C/(p·h + I) of eq. (25), broadcast; 0 for C = 0."""
    received = np.asarray(power_w * np.asarray(gain) + interference_w, dtype=np.float64)
    return constant_w / received if constant_w else np.zeros_like(received)


def scheduled_gamma(
    num_segments: Floats | int, error: Floats, num_blocks: int, options: RoundOptions
) -> Floats:
    """Γ = κ·(φ²·S²/L + ε(p) + φ²) of eq. (28), broadcast, for ``error`` = ε(p)."""
    split = options.gradient_bound * np.square(num_segments) / num_blocks
    return options.kappa * (split + error + options.gradient_bound)


def idle_gamma(channels: Sequence[Channel], options: RoundOptions) -> float:
    """Γ of a unit that is not scheduled, κ·(C/I + φ²): p = 0, S = 0, I the channels' mean I_j.

    Raises ``ConfigError`` where that is infinite: without interference.
    """
    interference = math.fsum(channel.interference_w for channel in channels) / len(channels)
    if options.interference_constant_w and not interference:
        raise ConfigError(
            f"round.interference_constant_w={options.interference_constant_w:g} with "
            "interference_w=0 on every channel: the drift of an idle unit is infinite; "
            "set the constant to 0, or interference_w above 0"
        )
    error = interference_error(0.0, 0.0, interference, options.interference_constant_w)
    return options.kappa * (float(error) + options.gradient_bound)


def gamma_power(
    num_segments: Floats, pair_gain: Floats, interference_w: Floats, problem: RoundProblem
) -> Floats:
    """The least p ≥ 0 with Γ ≤ Γ^max (C11), broadcast, in W; infinite where no p has."""
    options = problem.options
    limit = options.gamma_max * (1 + _ROUNDING)
    shape = np.broadcast_shapes(num_segments.shape, pair_gain.shape, interference_w.shape)
    fixed = scheduled_gamma(num_segments, np.zeros(()), problem.num_blocks, options)
    constant = options.kappa * options.interference_constant_w
    if not constant:
        return np.broadcast_to(np.where(fixed <= limit, 0.0, math.inf), shape)
    with np.errstate(divide="ignore"):
        power = (constant / (limit - fixed) - interference_w) / pair_gain
    return np.where(fixed < limit, np.maximum(power, 0.0), math.inf)


def round_gammas(problem: RoundProblem, allocations: Sequence[Allocation]) -> tuple[float, ...]:
    """Γ_n of all N units (eq. 28), for those without an allocation ``idle_gamma``."""
    gammas = [idle_gamma(problem.channels, problem.options)] * len(problem.uplinks)
    for each in allocations:
        error = interference_error(
            each.power_w,
            problem.uplinks[each.unit].gains[each.channel],
            problem.channels[each.channel].interference_w,
            problem.options.interference_constant_w,
        )
        segments = each.partition.num_segments
        gamma = scheduled_gamma(segments, error, problem.num_blocks, problem.options)
        gammas[each.unit] = float(gamma)
    return tuple(gammas)


def next_queues(
    queues: Sequence[float], gammas: Sequence[float], gamma_max: float
) -> tuple[float, ...]:
    """Y_n(t+1) = max(Y_n(t) + Γ_n(t) - Γ^max, 0) of eq. (29)."""
    return tuple(
        max(queue + gamma - gamma_max, 0.0) for queue, gamma in zip(queues, gammas, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Descent:
    """What Theorem 1 assumes of the loss and of the training.

    Attributes
    ----------
    smoothness, gradient_bound, curvature
        β (assumption 1), φ² (assumption 2), ξ (assumption 3, Polyak-Łojasiewicz).
    learning_rate
        η.
    num_units, num_blocks
        N and L.
    """

    smoothness: float
    gradient_bound: float
    curvature: float
    learning_rate: float
    num_units: int
    num_blocks: int


def optimality_gap(
    descent: Descent,
    initial_gap: float,
    num_segments: Sequence[int],
    errors: Sequence[float],
) -> float:
    """Theorem 1's bound on F(θ(T)) - F* after T rounds (eq. 23, with σ of eq. 24).

    The paper prints ∏(1 - 2σ)·F(θ(0)) - F*; a bracket is missing, since that is negative for large
    T. Here the product is of ``initial_gap`` = F(θ(0)) - F*. See ``check_step_size``.

    Parameters
    ----------
    num_segments, errors
        S and ε(p) (eq. 25) of each round t = 0 … T-1. Where units differ, their means over
        S² and ε, or their largest for a bound of the worst.
    """
    gap, added, rate = initial_gap, 0.0, descent.learning_rate
    for segments, error in zip(num_segments, errors, strict=True):
        sigma = contraction(descent, segments)
        split = segments**2 / descent.num_blocks + 1
        task = descent.smoothness * rate**2 * descent.gradient_bound * split
        gap *= 1 - 2 * sigma
        added = added * (1 - sigma) + (task + rate * error) / descent.num_units
    return gap + added


def contraction(descent: Descent, num_segments: int) -> float:
    """σ = ηξ - βη²/2·(1 + S²/(NL)) of eq. (24)."""
    rate = descent.learning_rate
    spread = 1 + num_segments**2 / (descent.num_units * descent.num_blocks)
    return rate * descent.curvature - descent.smoothness * rate**2 / 2 * spread


def step_size_limit(descent: Descent, num_segments: int) -> float:
    """Theorem 1's condition η < 4ξNL/(β·(S² + L))."""
    scale = 4 * descent.curvature * descent.num_units * descent.num_blocks
    return scale / (descent.smoothness * (num_segments**2 + descent.num_blocks))


def check_step_size(descent: Descent, num_segments: int) -> None:
    """Warns (``UserWarning``) where σ ≤ 0, so that the bound does not shrink.

    That is stricter than Theorem 1's own condition, which the paper derives from another σ than
    eq. (24)'s: η < 2ξNL/(β·(NL + S²)) is less than half of ``step_size_limit``.
    """
    sigma = contraction(descent, num_segments)
    if sigma > 0:
        return
    size = descent.num_units * descent.num_blocks
    needed = 2 * descent.curvature * size / (descent.smoothness * (size + num_segments**2))
    warnings.warn(
        f"learning rate {descent.learning_rate:g} with S={num_segments} makes σ = {sigma:.3g} "
        f"(eq. 24) and Theorem 1's bound grow: it needs a rate below {needed:.3g} "
        f"(the theorem itself says {step_size_limit(descent, num_segments):.3g}); "
        "lower the learning rate or the number of segments",
        stacklevel=2,
    )
