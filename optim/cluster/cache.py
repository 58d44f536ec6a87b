"""Verified fronts of solvers, each of which is computed once for equal problems."""

from collections import OrderedDict
from dataclasses import replace
from functools import cache, partial

import numpy as np

from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolver, Partition
from optim.sharing.exact import shared_partition
from optim.verified import rule_of, solve_verified

Front = tuple[Partition, ...]

_CAPACITY = 2**15  # problems: enough for two runs of 10,000 units, at a few kB each
_fronts: OrderedDict[tuple[ClusterProblem, ClusterSolver], Front] = OrderedDict()


def solve_cached(problem: ClusterProblem, solver: ClusterSolver, rng: np.random.Generator) -> Front:
    """Return the solver's verified front, from the cache if an equal problem was solved.

    A front is cached only if another call would find the same front: not if the solver drew from
    ``rng``. Limits of searches count nodes, not seconds. Raises like the solver and
    ``verify_cluster``.
    """
    key = problem, solver
    if key in _fronts:
        _fronts.move_to_end(key)
        return _fronts[key]
    before = rng.bit_generator.state
    solution = solve_verified(problem, solver, rng)
    front, bound_s = solution.front, solution.certificate.lower_bound
    if not solution.complete:
        front = tuple(replace(point, bound_s=bound_s) for point in front)
    if rng.bit_generator.state == before:
        _fronts[key] = front
        if len(_fronts) > _CAPACITY:
            _fronts.popitem(last=False)
    return front


def shares(solve: ClusterSolver) -> bool:
    """Whether the solver plans shared stages, and proves that they are the fastest."""
    return rule_of(solve) is shared_partition


def is_exact(solve: ClusterSolver) -> bool:
    """Whether the solver plans the fastest pipelines of single devices."""
    return rule_of(solve) is exact_partition


@cache  # the same object for the same solver, because ``solve_cached`` compares solvers
def single(solve: ClusterSolver) -> ClusterSolver:
    """Return the exact solver of pipelines of single devices, with the options of ``solve``."""
    return partial(exact_partition, **getattr(solve, "keywords", {}))
