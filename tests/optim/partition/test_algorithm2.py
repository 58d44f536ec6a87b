"""Algorithm 2: what each step guarantees, and how close the alternation is to the optimum."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget
from optim.latency import block_caps
from optim.partition.algorithm2 import (
    alternate,
    best_blocks,
    best_micro_batches,
    paper_partition,
    starting_micro_batches,
    stationary_micro_batches,
)
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolution, Latency
from optim.verify import verify_cluster
from tests.optim.instances import heterogeneous, paper_like, uneven
from tests.optim.laws import pipeline_latency
from tests.optim.partition_references import by_enumeration
from tests.thorough import cases

LAWS: tuple[Latency, ...] = get_args(Latency)
each_law = pytest.mark.parametrize("latency", LAWS)
RNG = np.random.default_rng(0)  # Algorithm 2 draws no random numbers


def latency_of(problem: ClusterProblem, blocks: tuple[int, ...], m: float) -> float:
    """Return the law's latency, also for an m that is not an integer."""
    return pipeline_latency(problem.devices, blocks, problem.batch_size, m, problem.latency)  # type: ignore[arg-type]


def least_by_enumeration(problem: ClusterProblem, num_micro_batches: int) -> float:
    """Return the least latency of all δ within the caps for one m; infinite if no δ fits."""
    caps = block_caps(problem)[num_micro_batches - 1]
    splits = itertools.product(*(range(cap + 1) for cap in caps.tolist()))
    whole = (blocks for blocks in splits if sum(blocks) == problem.num_blocks)
    return min((latency_of(problem, b, num_micro_batches) for b in whole), default=math.inf)


def solved(problem: ClusterProblem) -> ClusterSolution | None:
    """Return the verified answer; None if the caps cannot hold the model."""
    try:
        solution = paper_partition(problem, RNG)
    except InfeasibleRoundError:
        return None
    verify_cluster(solution, problem)
    assert len(solution.front) == 1
    assert solution.certificate.solver == "paper"
    assert solution.certificate.lower_bound == 0
    assert solution.certificate.objective == solution.best.latency_s
    return solution


@each_law
def test_the_latency_is_never_below_the_optimum(latency: Latency) -> None:
    found = 0
    for seed in range(cases(4, 9)):
        problem = heterogeneous(np.random.default_rng(seed), 4, 6, latency, max_micro_batches=8)
        least = by_enumeration(problem)[-1]
        solution = solved(problem)
        assert (solution is None) == math.isinf(least)
        if solution is not None:
            found += 1
            assert solution.best.latency_s >= least * (1 - 1e-9)
    assert found >= 3


@each_law
def test_most_partitions_of_the_papers_clusters_are_optimal(latency: Latency) -> None:
    near = []
    for seed in range(cases(3, 8)):
        problem = paper_like(np.random.default_rng(seed), latency, num_devices=4, num_blocks=6)
        least = by_enumeration(problem)[-1]
        near.append(paper_partition(problem, RNG).best.latency_s <= 1.001 * least)
    assert np.mean(near) >= 0.8


@each_law
def test_the_better_of_both_starts_is_near_the_optimum_of_uneven_clusters(latency: Latency) -> None:
    """It is closer to the optimum than the alternation from the even split's m⁽⁰⁾ alone."""
    above = []
    for seed in range(8):
        problem = uneven(np.random.default_rng(seed), latency, num_devices=5, num_blocks=8)
        least = exact_partition(problem).best.latency_s
        _, ours = starting_micro_batches(problem)
        ends = latency_of(problem, *alternate(problem, ours)), solved(problem).best.latency_s
        above.append([end / least - 1 for end in ends])
    alone, both = np.mean(above, axis=0)
    assert both < min(alone, 0.03)


def test_the_papers_start_is_one_micro_batch_and_ours_has_more() -> None:
    problem = uneven(np.random.default_rng(0), "bound")
    assert starting_micro_batches(problem)[0] == 1
    assert starting_micro_batches(problem)[1] > 1


@each_law
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_blocks_are_optimal_for_their_micro_batches(
    latency: Latency, num_micro_batches: int
) -> None:
    for seed in range(cases(3, 8)):
        problem = heterogeneous(np.random.default_rng(seed), 4, 6, latency, max_micro_batches=8)
        least = least_by_enumeration(problem, num_micro_batches)
        if math.isfinite(least):
            blocks = best_blocks(problem, num_micro_batches)
            assert sum(blocks) == problem.num_blocks
            assert (np.array(blocks) <= block_caps(problem)[num_micro_batches - 1]).all()
            # HiGHS guarantees only 1e-6.
            assert latency_of(problem, blocks, num_micro_batches) <= least * (1 + 1e-5)


@each_law
def test_the_closed_form_is_the_latencys_stationary_point(latency: Latency) -> None:
    """The slowest device, or resource, is the same for every m."""
    laws = [AffineLaw(u, 0.5 * u, 0.1 * u, 0.4 * u) for u in (0.2, 0.3, 0.5)]
    devices = tuple(DeviceProfile(f"device-{k}", law) for k, law in enumerate(laws))
    problem, blocks = ClusterProblem(devices, 12, 64, 64, latency), (4, 4, 4)
    m = stationary_micro_batches(problem, blocks, 5)
    assert 1 < m < 64
    for other in (0.99 * m, 1.01 * m):
        assert latency_of(problem, blocks, m) < latency_of(problem, blocks, other)
        around = latency_of(problem, blocks, other) / latency_of(problem, blocks, m)
        assert around - 1 < 1e-4


@pytest.mark.parametrize("latency", ["bound", "flow_shop"])
def test_equal_chunks_have_the_papers_closed_form(latency: Latency) -> None:
    law = AffineLaw(0.3, 0.2, 0.05, 0.4)
    problem = ClusterProblem((DeviceProfile("a", law),) * 3, 12, 64, 64, latency)
    whole, each = 64 * (4 * law.u + law.w), 4 * law.v + law.ell
    expected = math.sqrt(2 * whole / each)
    assert stationary_micro_batches(problem, (4, 4, 4), 1) == pytest.approx(expected)


def test_an_infinite_stationary_point_gives_the_largest_m() -> None:
    free = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0))
    problem = ClusterProblem((free, free), 2, 8, 5, "flow_shop")
    assert stationary_micro_batches(problem, (1, 1), 1) == math.inf
    assert best_micro_batches(problem, (1, 1), 1) == 5
    assert stationary_micro_batches(problem, (2, 0), 1) == 0
    solution = solved(problem)
    assert solution is not None
    assert solution.best.num_micro_batches == 5


@each_law
def test_new_micro_batches_are_feasible_and_not_slower(latency: Latency) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = heterogeneous(rng, 4, 6, latency, max_micro_batches=16)
        m = int(rng.integers(1, 17))
        blocks = tuple(int(cap) for cap in block_caps(problem)[m - 1])
        if not sum(blocks):
            continue
        better = best_micro_batches(problem, blocks, m)
        assert latency_of(problem, blocks, better) <= latency_of(problem, blocks, m)
        assert (np.array(blocks) <= block_caps(problem)[better - 1]).all()


@each_law
def test_neither_step_improves_the_answer(latency: Latency) -> None:
    for seed in range(cases(2, 4)):
        problem = heterogeneous(np.random.default_rng(seed), 5, 8, latency, max_micro_batches=16)
        solution = solved(problem)
        if solution is None:
            continue
        best = solution.best
        again = best_blocks(problem, best.num_micro_batches)
        least = latency_of(problem, again, best.num_micro_batches)
        assert best.latency_s <= least * (1 + 1e-5)
        m = best_micro_batches(problem, best.blocks, best.num_micro_batches)
        assert m == best.num_micro_batches


@each_law
def test_one_device_or_one_block_gives_one_segment(latency: Latency) -> None:
    device = DeviceProfile("a", AffineLaw(1.0, 0.5, 0.1, 0.2))
    for devices, num_blocks in (((device,), 3), ((device, device), 1)):
        solution = solved(ClusterProblem(devices, num_blocks, 4, 3, latency))
        assert solution is not None
        assert solution.best.num_segments == 1


def test_energy_may_require_more_micro_batches() -> None:
    """With a budget per micro-batch, a larger m allows more blocks; m < 4 allows too few."""
    law = AffineLaw(1.0, 0.0, 0.0, 0.0)
    budget = EnergyBudget(4.0, law, "micro_batch")
    device = DeviceProfile("a", replace(law, ell=100.0), energy=budget)
    solution = solved(ClusterProblem((device, device), 4, 8, 8, "bound"))
    assert solution is not None
    assert solution.best.num_micro_batches >= 4


def test_devices_that_cannot_hold_the_model_are_refused() -> None:
    law = AffineLaw(1.0, 0.0, 0.0, 0.1)
    devices = (DeviceProfile("pi", law, 2), DeviceProfile("phone", law, 1))
    with pytest.raises(
        InfeasibleRoundError, match=r"at most 3 of 4 blocks .*\(pi: 2 .*, phone: 1 "
    ):
        paper_partition(ClusterProblem(devices, 4, 8, 8, "bound"), RNG)
