"""Solve Sub-1 exactly: the fastest partitions of a cluster for every number of segments."""

import math
import time
from dataclasses import replace

import numpy as np

from collapipe.plan import Certificate
from optim.latency import batch_s, model_too_large, partition_of
from optim.partition.additive import sum_splits
from optim.partition.bound import bound_splits
from optim.partition.envelope import Envelope, Splits
from optim.partition.rates import PROGRESS, Rates
from optim.problem import ClusterProblem, ClusterSolution, Floats


def exact_partition(
    problem: ClusterProblem, rng: np.random.Generator | None = None, time_limit_s: float = math.inf
) -> ClusterSolution:
    """Return the whole front of Sub-1: for each S the proven fastest partition with at most S.

    ``rng`` is not used. A time limit may leave the front incomplete; the certificate's lower bound
    of the latency still holds.

    Raises ``InfeasibleRoundError`` if the caps cannot hold the model for any m.
    """
    start = time.perf_counter()
    rates = Rates.of(problem)
    if not rates.sufficient_rows().size:
        raise model_too_large(problem)
    asked, low = _times(problem, rates), problem.activation_s[0]
    continuous = math.isinf(problem.activation_s[-1])
    best = Envelope(asked, continuous, rates.max_segments, _alone(rates))
    search = bound_splits if rates.paced else sum_splits
    lower = search(rates, best, start + time_limit_s)
    splits, ranges = best.front()
    found = zip(splits.blocks.tolist(), splits.row.tolist(), ranges.tolist(), strict=True)
    front = tuple(
        replace(partition_of(problem, blocks, row + 1), fastest_s=(first, last))
        for blocks, row, (first, last) in found
    )
    # Of equally fast points the first one has the fewest segments.
    times = [batch_s(point, low) for point in front]
    fastest = min(range(len(front)), key=times.__getitem__)
    # After a complete search the gap is only rounding.
    lower = times[fastest] if lower >= times[fastest] * (1 - 10 * PROGRESS) else lower
    elapsed = time.perf_counter() - start
    certificate = Certificate(times[fastest], lower, "exact", elapsed)
    # Within the time limit the search was complete.
    return ClusterSolution(front, front[fastest], certificate, complete=elapsed < time_limit_s)


def _times(problem: ClusterProblem, rates: Rates) -> Floats:
    """Return the requested uplink times. Infinity is replaced by a time beyond which the uplink is
    the slowest stage of every partition."""
    most = rates.bottleneck(np.arange(len(rates.caps)), rates.caps).max(axis=1)
    counts = np.arange(1, len(most) + 1)
    slowest = float((counts * np.maximum(most, rates.floor)).max())
    *finite, last = problem.activation_s
    return np.array([*finite, last if math.isfinite(last) else max(finite[-1], slowest)])


def _alone(rates: Rates) -> Splits:
    """Return the splits with S = 1: each device that can hold all blocks, with each m."""
    row, device = np.nonzero(rates.caps >= rates.num_blocks)
    blocks = np.zeros((len(row), rates.caps.shape[1]))
    blocks[np.arange(len(row)), device] = rates.num_blocks
    return Splits.of(rates, row, blocks)
