"""What the convergence bound assumes, estimated from what training shows anyway."""

import math
from dataclasses import dataclass

from collapipe.state import Estimates

_LEAST_LOSS = 1e-30  # less tells of rounding, and the quotient of a norm by it may be infinite


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """What a round showed of the loss: the mean of ‖∇F‖² over the units' steps, the training loss,
    F, and ‖θ(t+1) - θ(t)‖, by which the model moved."""

    squared_norm: float
    loss: float
    moved: float


def estimate(before: Estimates, last: RoundObservation | None, now: RoundObservation) -> Estimates:
    """Estimates after a round, ``last`` being the round before it.

    Norms tell |‖∇F(θ)‖ - ‖∇F(θ')‖| ≤ β·‖θ - θ'‖ (assumption 1 and the triangle inequality), and
    ‖∇F‖² ≥ 2ξ(F - F*) (assumption 3), in which F* ≥ 0 for a cross-entropy. Gradients are those of
    batches, so that their noise is in the estimates.
    """
    smoothness = before.smoothness
    if last is not None and last.moved > 0:
        change = abs(math.sqrt(now.squared_norm) - math.sqrt(last.squared_norm))
        smoothness = max(smoothness or 0.0, change / last.moved)
    curvature = before.curvature
    if now.loss > _LEAST_LOSS:
        shown = now.squared_norm / (2 * now.loss)
        curvature = shown if curvature is None else min(curvature, shown)
    return Estimates(max(before.gradient_bound or 0.0, now.squared_norm), smoothness, curvature)
