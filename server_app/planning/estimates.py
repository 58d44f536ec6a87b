"""Observe the loss and its gradient in each round, and estimate the scheduler's constants."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from collapipe.report import ClusterReport
from collapipe.state import Estimates

DEFAULT_FACTOR = 10.0
"""A unit's loss or gradient norm counts for at most this multiple of the units' median, unless
``federation.max_update_norm`` is set."""
MAJORITY = 3
"""The least number of units that can outvote one."""
_LEAST_LOSS = 1e-30  # a smaller loss is rounding, and a norm divided by it may be infinite


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """Measurements of one round: the mean of ‖∇F‖² over the units' steps, the training loss F, and
    the model's movement ‖θ(t+1) - θ(t)‖."""

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
    """Combine the units' ``reports`` of a round; their ``losses`` are averaged by ``shares``.

    A loss above ``factor`` times the median, or a squared norm above ``factor``² times the median,
    is cut to that bound. With fewer than three units the ``last`` round counts in the median.
    """
    before = [last] if last else []
    norms = [float(np.mean(each.squared_norms)) for each in reports.values()]
    squared_norms = bounded(norms, factor**2, [each.squared_norm for each in before])
    bounded_losses = bounded([*losses.values()], factor, [each.loss for each in before])
    loss = np.average(bounded_losses, weights=[*shares.values()])
    return RoundObservation(float(np.mean(squared_norms)), float(loss), moved)


def bounded(values: Sequence[float], factor: float, before: Sequence[float]) -> list[float]:
    """Cut values to the range from 0 to ``factor`` times their median. The median of fewer than
    three values includes the values ``before``."""
    most = factor * median_low([*values, *before] if len(values) < MAJORITY else values)
    return [max(0.0, min(each, most)) for each in values]


def estimate(before: Estimates, last: RoundObservation | None, now: RoundObservation) -> Estimates:
    """Update the estimates with a round; ``last`` is the round before it.

    β follows from |‖∇F(θ)‖ - ‖∇F(θ')‖| ≤ β·‖θ - θ'‖ (assumption 1 and the triangle inequality).
    ξ follows from ‖∇F‖² ≥ 2ξ(F - F*) (assumption 3), with F* ≥ 0 for a cross-entropy. The gradients
    are computed on batches, so the estimates contain the batches' noise.
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
