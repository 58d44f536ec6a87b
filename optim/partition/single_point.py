"""Make solvers from heuristics, which return one partition within the caps."""

from collections.abc import Callable, Sequence
from functools import wraps
from time import perf_counter

import numpy as np

from collapipe.plan import Certificate
from optim.latency import batch_s, partition_of, require_within_caps
from optim.problem import ClusterProblem, ClusterSolution, ClusterSolver, Partition

Cut = tuple[tuple[int, ...], int]
"""δ_k of each device, and m."""
Split = Callable[[ClusterProblem, np.random.Generator], Cut]


def single_point(solver: str) -> Callable[[Split], ClusterSolver]:
    """Make a solver from a function that returns δ and m; the lower bound is 0.

    The solver raises ``InfeasibleRoundError`` if the split exceeds a cap of memory or energy.
    """

    def solver_of(split: Split) -> ClusterSolver:
        @wraps(split)
        def solve(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
            started = perf_counter()
            blocks, m = split(problem, rng)
            require_within_caps(solver, problem, blocks, m)
            return answer(solver, problem, partition_of(problem, blocks, m), started)

        return solve

    return solver_of


def answer(
    solver: str, problem: ClusterProblem, partition: Partition, started: float
) -> ClusterSolution:
    """Make a solution of one point; ``started`` is ``perf_counter`` at the solver's start."""
    seconds = batch_s(partition, problem.activation_s[0])
    certificate = Certificate(seconds, 0.0, solver, perf_counter() - started)
    return ClusterSolution((partition,), partition, certificate)


def split_latency(problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int) -> float:
    """Return the seconds of a batch under the problem's law."""
    return partition_of(problem, blocks, num_micro_batches).latency_s
