"""Theorem 1: a bound of the loss after T rounds, from each round's S and interference."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Descent:
    """The assumptions of Theorem 1 about the loss and the training."""

    smoothness: float  # β (assumption 1)
    gradient_bound: float  # φ² (assumption 2)
    curvature: float  # ξ (assumption 3, Polyak-Łojasiewicz)
    learning_rate: float  # η
    num_units: int  # N
    num_blocks: int  # L


def optimality_gap(
    descent: Descent,
    initial_gap: float,
    num_segments: Sequence[int],
    errors: Sequence[float],
) -> float:
    """Return Theorem 1's bound on F(θ(T)) - F* after T rounds (eq. 23, with σ of eq. 24).

    The paper prints ∏(1 - 2σ)·F(θ(0)) - F*, which lacks a bracket: it is negative for large T. Here
    the product multiplies ``initial_gap`` = F(θ(0)) - F*. See ``check_step_size``.

    ``num_segments`` and ``errors`` are S and ε(p) (eq. 25) of each round t = 0 … T-1. If units
    differ, use the means of S² and ε, or the largest values for a worst-case bound.
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
    """Return σ = ηξ - βη²/2·(1 + S²/(NL)) of eq. (24)."""
    rate = descent.learning_rate
    spread = 1 + num_segments**2 / (descent.num_units * descent.num_blocks)
    return rate * descent.curvature - descent.smoothness * rate**2 / 2 * spread


def step_size_limit(descent: Descent, num_segments: int) -> float:
    """Return the limit of Theorem 1's condition η < 4ξNL/(β·(S² + L))."""
    scale = 4 * descent.curvature * descent.num_units * descent.num_blocks
    return scale / (descent.smoothness * (num_segments**2 + descent.num_blocks))


def check_step_size(descent: Descent, num_segments: int) -> None:
    """Warn (``UserWarning``) if σ ≤ 0, because the bound then does not shrink.

    This check is stricter than Theorem 1's own condition, which the paper derives from another σ
    than eq. (24). It requires η < 2ξNL/(β·(NL + S²)), less than half of ``step_size_limit``.
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
