"""How a heuristic answers: one partition, within the caps, with what it costs under the law."""

from collections.abc import Callable, Sequence
from time import perf_counter

from collapipe.plan import Certificate
from optim.latency import pipeline_latency, require_within_caps
from optim.problem import ClusterProblem, ClusterSolution, Partition

Placement = tuple[tuple[int, ...], int]
"""δ_k of each device, and m."""


def single_point(
    solver: str, problem: ClusterProblem, split: Callable[[ClusterProblem], Placement]
) -> ClusterSolution:
    """The answer of a heuristic that returns δ and m, its time measured; no bound is known.

    Raises ``InfeasibleRoundError`` where the split breaks a cap of memory or energy.
    """
    started = perf_counter()
    blocks, num_micro_batches = split(problem)
    require_within_caps(solver, problem, blocks, num_micro_batches)
    latency = split_latency(problem, blocks, num_micro_batches)
    return answer(solver, Partition(blocks, num_micro_batches, latency), started)


def answer(solver: str, partition: Partition, started: float) -> ClusterSolution:
    """A front of one point; ``started`` is the performance counter at the beginning."""
    return ClusterSolution(
        front=(partition,),
        certificate=Certificate(partition.latency_s, 0.0, solver, perf_counter() - started),
    )


def split_latency(problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int) -> float:
    """Seconds of a batch under the problem's law."""
    return pipeline_latency(
        problem.devices, blocks, problem.batch_size, num_micro_batches, problem.latency
    )
