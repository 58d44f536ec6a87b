"""Check that a solver's plans are as fast as an oracle's, for all uplink times."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from optim.latency import batch_s
from optim.problem import ClusterProblem, ClusterSolution, ClusterSolver
from optim.verified import solve_verified
from optim.verify.cluster import verify_cluster

_BETWEEN = (0.3, 2.0, 9.0, 30.0, 1e3)  # samples of a range of uplink times


def sampled_times(problem: ClusterProblem) -> list[float]:
    """Return the problem's uplink times, and samples if it has a range."""
    finite = [each for each in problem.activation_s if math.isfinite(each)]
    return finite + ([*_BETWEEN] if len(finite) < len(problem.activation_s) else [])


def solved(
    problem: ClusterProblem, solver: ClusterSolver, expected_s: Sequence[float]
) -> ClusterSolution | None:
    """Return the solution if it is verified, complete, and as fast as expected at each uplink time.
    Return None if no plan fits, as expected."""
    if math.isinf(expected_s[0]):
        with pytest.raises(InfeasibleRoundError):
            solve_verified(problem, solver, np.random.default_rng(0))
        return None
    solution = solve_verified(problem, solver, np.random.default_rng(0))
    verify_cluster(solution, problem)
    found_s = [
        min(batch_s(each, time_s) for each in solution.front) for time_s in sampled_times(problem)
    ]
    assert found_s == pytest.approx(expected_s, rel=1e-9)
    assert solution.certificate.gap == pytest.approx(0, abs=1e-9) and solution.complete
    return solution
