"""Equal problems are solved once, unless the solver draws random numbers."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from collapipe.errors import PlanViolationError
from collapipe.state import AffineLaw, DeviceProfile
from optim.cluster import cache
from optim.cluster.cache import solve_cached
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolution
from optim.solvers import cluster_solver

SLOW, FAST = AffineLaw(0.09, 0.01, 0.0, 0.02), AffineLaw(0.02, 0.01, 0.0, 0.02)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_fronts", type(cache._fronts)())


class Counted:
    """A solver that counts its calls."""

    def __init__(self, name: str) -> None:
        self.solve, self.calls = cluster_solver(name), 0

    def __call__(self, problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
        self.calls += 1
        return self.solve(problem, rng)


def cluster(*laws: AffineLaw) -> ClusterProblem:
    """Return a problem with equal values but new objects on each call."""
    devices = tuple(DeviceProfile(f"d{k}", replace(law)) for k, law in enumerate(laws))
    return ClusterProblem(devices, 6, 16, 16, "overlap")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_equal_problems_are_solved_once_and_changed_ones_again() -> None:
    solve = Counted("exact")
    first = solve_cached(cluster(SLOW, FAST), solve, rng(1))
    assert solve_cached(cluster(SLOW, FAST), solve, rng(2)) == first
    assert solve.calls == 1
    changed = cluster(SLOW, replace(FAST, u=0.0201))
    assert solve_cached(changed, solve, rng()) == exact_partition(changed).front != first
    assert solve.calls == 2


def test_a_solver_that_draws_random_numbers_is_always_called() -> None:
    solve, problem = Counted("no_segment_scheduling"), cluster(SLOW, FAST, SLOW, FAST)
    found = {solve_cached(problem, solve, rng(seed))[0].blocks for seed in range(10)}
    assert solve.calls == 10
    assert len(found) > 1


def test_a_cached_front_of_an_unfinished_search_keeps_its_bound() -> None:
    """The limit is part of the solver, so a solver with another limit searches again."""
    problem, hurried = cluster(SLOW, FAST, SLOW, FAST), partial(exact_partition, max_nodes=0)
    found, complete = hurried(problem), exact_partition(problem)
    assert not found.complete and found.certificate.lower_bound <= complete.best.latency_s
    for _ in range(2):
        points = solve_cached(problem, hurried, rng())
        assert {point.bound_s for point in points} == {found.certificate.lower_bound}
    assert solve_cached(problem, exact_partition, rng()) == complete.front
    assert all(math.isinf(point.bound_s) for point in complete.front)


def test_solvers_do_not_share_cached_fronts() -> None:
    problem = cluster(SLOW, FAST)
    fronts = {solve_cached(problem, cluster_solver(each), rng()) for each in ("exact", "titanic")}
    assert len(fronts) == 2


def test_a_refuted_answer_is_not_cached() -> None:
    problem = cluster(SLOW, FAST)

    def claims_too_much(given: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
        right = exact_partition(given)
        return replace(right, front=(replace(right.best, latency_s=0.1),))

    for _ in range(2):
        with pytest.raises(PlanViolationError):
            solve_cached(problem, claims_too_much, rng())


def test_the_most_recently_used_fronts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_CAPACITY", 2)
    solve, one, two, three = Counted("exact"), cluster(SLOW), cluster(FAST), cluster(FAST, FAST)
    for problem in (one, two, one, three):  # ``two`` is now the least recently used
        solve_cached(problem, solve, rng())
    assert solve.calls == 3
    solve_cached(one, solve, rng())
    assert solve.calls == 3
    solve_cached(two, solve, rng())
    assert solve.calls == 4
