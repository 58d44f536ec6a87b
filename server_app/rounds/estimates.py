"""What rounds show of the loss, and what the scheduler estimates from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from collapipe.report import ClusterReport
from collapipe.state import Estimates
from server_app.rounds.screening import bounded

_LEAST_LOSS = 1e-30  # less tells of rounding, and the quotient of a norm by it may be infinite


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """What a round showed of the loss: the mean of ‖∇F‖² over the units' steps, the training loss,
    F, and ‖θ(t+1) - θ(t)‖, by which the model moved."""

    squared_norm: float
    loss: float
    moved: float


def observed(
    reports: Mapping[int, ClusterReport],
    losses: Mapping[int, float],
    shares: Mapping[int, float],
    moved: float,
    factor: float,
    last: RoundObservation | None,
) -> RoundObservation:
    """What the units' ``reports`` of a round show; their ``losses`` are averaged by ``shares``.

    A figure beyond ``factor`` times the others', and what the ``last`` round showed, changes
    nothing more.
    """
    before = [last] if last else []
    norms = [float(np.mean(each.squared_norms)) for each in reports.values()]
    squared_norms = bounded(norms, factor**2, [each.squared_norm for each in before])
    told = bounded([*losses.values()], factor, [each.loss for each in before])
    loss = np.average(told, weights=[*shares.values()])
    return RoundObservation(float(np.mean(squared_norms)), float(loss), moved)


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
