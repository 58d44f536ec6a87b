"""Sub-1, exactly: the fastest partition of a cluster for every number of segments."""

import math
import time

import numpy as np

from collapipe.plan import Certificate
from optim.latency import model_too_large, pipeline_latency
from optim.partition.additive import sum_splits
from optim.partition.bound import bound_splits
from optim.partition.rates import PROGRESS, BestSplits, Rates
from optim.problem import ClusterProblem, ClusterSolution, Partition


def exact_partition(
    problem: ClusterProblem, rng: np.random.Generator | None = None, time_limit_s: float = math.inf
) -> ClusterSolution:
    """The whole front of Sub-1: of each S the fastest partition, proved to be so.

    Nothing is drawn from ``rng``. A time limit may leave the front incomplete; the certificate's
    lower bound of the latency holds all the same.

    Raises ``InfeasibleRoundError`` where the caps cannot hold the model at any m.
    """
    start = time.perf_counter()
    rates = Rates.of(problem)
    if not rates.sufficient_rows().size:
        raise model_too_large(problem)
    best = _alone(problem, rates)
    search = bound_splits if problem.latency == "bound" else sum_splits
    lower = search(rates, best, start + time_limit_s)
    front = _front(problem, best)
    objective = front[-1].latency_s
    # What is left of a search to the end is rounding.
    lower = objective if lower >= objective * (1 - 10 * PROGRESS) else lower
    elapsed = time.perf_counter() - start
    certificate = Certificate(objective, lower, "exact", elapsed)
    # Within the limit no part of the search can have been left out.
    return ClusterSolution(front, certificate, complete=elapsed < time_limit_s)


def _alone(problem: ClusterProblem, rates: Rates) -> BestSplits:
    """S = 1 in closed form: the fastest single device, with the smallest m that is as fast."""
    best, rows = BestSplits.none(rates), np.arange(len(rates.caps))
    whole = np.full_like(rates.caps, rates.num_blocks)
    chunk = rates.per_block * rates.num_blocks + rates.hop
    slowest = chunk if problem.latency == "bound" else rates.bottleneck(rows, whole)
    latency = np.where(rates.caps >= whole, chunk + rows[:, None] * slowest, np.inf)
    fastest = best.latency[0] = latency.min()
    if np.isfinite(fastest):
        best.row[0], device = np.argwhere(latency <= fastest * (1 + PROGRESS))[0]
        best.blocks[0, device] = rates.num_blocks
    return best


def _front(problem: ClusterProblem, best: BestSplits) -> tuple[Partition, ...]:
    """The splits that no other with as few segments beats."""
    partitions = []
    for index in best.useful():
        blocks, m = tuple(best.blocks[index].tolist()), int(best.row[index]) + 1
        latency = pipeline_latency(problem.devices, blocks, problem.batch_size, m, problem.latency)
        partitions.append(Partition(blocks, m, latency))
    partitions.sort(key=lambda one: (one.num_segments, one.latency_s, one.num_micro_batches))
    front = partitions[:1]
    for one in partitions[1:]:
        if one.latency_s < front[-1].latency_s * (1 - PROGRESS):
            front.append(one)
    return tuple(front)
