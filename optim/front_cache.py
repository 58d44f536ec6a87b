"""Fronts of clusters that are as they were: nobody splits the same devices twice."""

from collections import OrderedDict

import numpy as np

from optim.problem import ClusterProblem, ClusterSolver, Partition
from optim.verify import verify_cluster

_MOST = 512  # of the latest, some MB
_fronts: OrderedDict[tuple[ClusterProblem, ClusterSolver], tuple[Partition, ...]] = OrderedDict()


def verified_front(
    problem: ClusterProblem, solve: ClusterSolver, rng: np.random.Generator
) -> tuple[Partition, ...]:
    """The front that ``solve`` finds, verified; the same one again for the same problem.

    A solver that draws from ``rng`` is asked every time. Raises as ``solve`` and
    ``verify_cluster``; nothing is remembered then.
    """
    asked = problem, solve
    if asked in _fronts:
        _fronts.move_to_end(asked)
        return _fronts[asked]
    before = rng.bit_generator.state
    solution = solve(problem, rng)
    verify_cluster(solution, problem)
    if rng.bit_generator.state == before:
        _fronts[asked] = solution.front
        while len(_fronts) > _MOST:
            _fronts.popitem(last=False)
    return solution.front
