"""Fronts of clusters that are as they were: nobody splits the same devices twice."""

from collections import OrderedDict

import numpy as np

from optim.problem import ClusterProblem, ClusterSolver, Partition
from optim.verify import verify_cluster

_CAPACITY = 512  # the latest fronts, some MB
_fronts: OrderedDict[tuple[ClusterProblem, ClusterSolver], tuple[Partition, ...]] = OrderedDict()


def solve_cached(
    problem: ClusterProblem, solver: ClusterSolver, rng: np.random.Generator
) -> tuple[Partition, ...]:
    """The front that ``solver`` finds, verified; from the cache for an equal problem.

    A front is cached only where another call would find the same: not if the solver drew from
    ``rng``, nor if a time limit ended its search. Raises as the solver and ``verify_cluster``.
    """
    key = problem, solver
    if key in _fronts:
        _fronts.move_to_end(key)
        return _fronts[key]
    before = rng.bit_generator.state
    solution = solver(problem, rng)
    verify_cluster(solution, problem)
    if solution.complete and rng.bit_generator.state == before:
        _fronts[key] = solution.front
        if len(_fronts) > _CAPACITY:
            _fronts.popitem(last=False)
    return solution.front
