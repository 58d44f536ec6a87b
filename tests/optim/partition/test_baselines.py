"""Baseline partitions: every answer is a valid plan and optimal for its own objective."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import InfeasibleRoundError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget
from optim.latency import batch_s, block_caps
from optim.partition.baselines import (
    best_subset,
    gpipe,
    no_segment_scheduling,
    pipedream,
    pipeedge,
    pipeline_even,
    slowest_stage_split,
    stage_times,
    titanic,
    vanilla_fl,
)
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolver, Latency, Partition
from optim.verify import verify_cluster
from tests.optim.instances import heterogeneous
from tests.optim.laws import pipeline_latency

LAWS: tuple[Latency, ...] = get_args(Latency)
each_law = pytest.mark.parametrize("latency", LAWS)
PIPELINES = (pipeline_even, titanic, no_segment_scheduling, gpipe, pipedream, pipeedge)


def cluster(
    seed: int, latency: Latency, num_devices: int = 4, num_blocks: int = 6, capped: bool = False
) -> ClusterProblem:
    rng = np.random.default_rng(seed)
    problem = heterogeneous(rng, num_devices, num_blocks, latency, max_micro_batches=12)
    return problem if capped else uncapped(problem)


def uncapped(problem: ClusterProblem) -> ClusterProblem:
    free = tuple(replace(each, max_blocks=None, energy=None) for each in problem.devices)
    return replace(problem, devices=free)


def answer(solver: ClusterSolver, problem: ClusterProblem, seed: int = 0) -> Partition:
    """Return the verified single point."""
    solution = solver(problem, np.random.default_rng(seed))
    verify_cluster(solution, problem)
    assert len(solution.front) == 1
    assert solution.certificate.lower_bound == 0
    return solution.best


def latency_of(problem: ClusterProblem, blocks: tuple[int, ...], m: int) -> float:
    return pipeline_latency(problem.devices, blocks, problem.batch_size, m, problem.latency)


def devices_with(speeds: list[float], **limits: object) -> tuple[DeviceProfile, ...]:
    """Return devices that compute ``speeds`` blocks times samples per second, with free hops."""
    laws = [AffineLaw(1 / speed, 0.0, 0.0, 0.0) for speed in speeds]
    return tuple(DeviceProfile(f"d{k}", law, **limits) for k, law in enumerate(laws))  # type: ignore[arg-type]


@each_law
@pytest.mark.parametrize("solver", PIPELINES)
def test_objectives_include_the_uplink_the_head_and_the_downlink(
    solver: ClusterSolver, latency: Latency
) -> None:
    """The objective is for the first uplink time, and not better than the optimum."""
    problem = replace(cluster(0, latency), activation_s=(9.0, 30.0), head_s=20.0, gradient_s=8.0)
    solution = solver(problem, np.random.default_rng(0))
    verify_cluster(solution, problem)
    assert solution.certificate.objective == batch_s(solution.best, 9.0) > batch_s(solution.best, 0)
    least = exact_partition(problem).certificate.objective
    assert solution.certificate.objective >= least * (1 - 1e-9)


@each_law
@pytest.mark.parametrize("solver", PIPELINES)
@pytest.mark.parametrize(("num_devices", "num_blocks"), [(1, 1), (1, 4), (3, 7), (5, 3)])
def test_every_pipeline_is_valid_and_no_better_than_the_optimum(
    solver: ClusterSolver, latency: Latency, num_devices: int, num_blocks: int
) -> None:
    for seed in range(3):
        problem = cluster(seed, latency, num_devices, num_blocks)
        best = answer(solver, problem, seed)
        assert sum(best.blocks) == num_blocks
        assert best.latency_s == latency_of(problem, best.blocks, best.num_micro_batches)
        assert best.latency_s >= exact_partition(problem).best.latency_s * (1 - 1e-9)


@pytest.mark.parametrize("solver", PIPELINES)
def test_answers_keep_the_caps_or_errors_name_a_device(solver: ClusterSolver) -> None:
    """Each device holds 1 to 3 of the 6 blocks, and some have little energy."""
    answered = refused = 0
    for seed in range(40):
        problem, rng = cluster(seed, "overlap", capped=True), np.random.default_rng(seed)
        limits = rng.integers(1, 4, size=4).tolist()
        devices = tuple(
            replace(device, max_blocks=limit)
            for device, limit in zip(problem.devices, limits, strict=True)
        )
        try:
            answer(solver, replace(problem, devices=devices), seed)
            answered += 1
        except InfeasibleRoundError as error:
            refused += 1
            assert "device-" in str(error)
    assert answered
    assert refused


@pytest.mark.parametrize("solver", [pipeline_even, titanic, gpipe])
def test_a_limit_that_is_too_low_is_named(solver: ClusterSolver) -> None:
    devices = devices_with([1, 1, 1])
    small = (devices[0], replace(devices[1], max_blocks=1), devices[2])
    with pytest.raises(
        InfeasibleRoundError, match=r"device d1 would hold 2.*at most 1 fit its max_blocks"
    ):
        answer(solver, ClusterProblem(small, 6, 8, 8, "bound"))


@pytest.mark.parametrize("solver", [pipedream, pipeedge])
def test_caps_that_cannot_hold_the_model_are_named(solver: ClusterSolver) -> None:
    devices = devices_with([1, 2], max_blocks=2)
    with pytest.raises(InfeasibleRoundError, match=r"at most 4 of 5 blocks .*\(d0: 2 .*, d1: 2 "):
        answer(solver, ClusterProblem(devices, 5, 8, 8, "flow_shop"))


def test_vanilla_fl_waits_for_the_slowest_replica() -> None:
    laws = [AffineLaw(0.1, 0.5, 9.0, 9.0), AffineLaw(0.3, 0.0, 9.0, 9.0)]
    devices = tuple(DeviceProfile(name, law) for name, law in zip("ab", laws, strict=True))
    best = answer(vanilla_fl, ClusterProblem(devices, 10, 64, 8, "overlap"))
    assert best.latency_s == pytest.approx(10 * 0.3 * 32)
    assert best.replicated
    assert best.blocks == (10, 10)
    assert best.num_segments == 1
    kept = ClusterProblem(devices, 10, 64, 4, "overlap", min_micro_batches=4)
    assert answer(vanilla_fl, kept) == best


def test_vanilla_fl_names_the_devices_that_cannot_hold_the_model() -> None:
    devices = devices_with([1, 1, 1, 1])
    budget = EnergyBudget(40.0, AffineLaw(1.0, 0.0, 99.0, 99.0))
    lacking = (replace(devices[1], max_blocks=4), replace(devices[2], energy=budget))
    problem = ClusterProblem((devices[0], *lacking, devices[3]), 6, 32, 8, "bound")
    with pytest.raises(InfeasibleRoundError, match="d1 holds at most 4, d2 needs 48 J of 40 J"):
        answer(vanilla_fl, problem)
    enough = replace(devices[2], energy=replace(budget, limit_j=48.0))
    answer(vanilla_fl, replace(problem, devices=(enough, *devices[:3])))
    tenths = replace(budget, limit_j=0.3, law=AffineLaw(0.1 / 8, 0.0, 0.0, 0.0))
    exactly = replace(devices[2], energy=tenths)  # 3 * 0.1 is above 0.3
    answer(vanilla_fl, replace(problem, num_blocks=3, devices=(exactly, *devices[:3])))


def test_pipeline_splits_evenly_with_eight_micro_batches() -> None:
    problem = ClusterProblem(devices_with([1, 9, 3, 4]), 10, 64, 64, "bound")
    best = answer(pipeline_even, problem)
    assert best.blocks == (3, 3, 2, 2)
    assert best.num_micro_batches == 8
    assert answer(pipeline_even, replace(problem, max_micro_batches=5)).num_micro_batches == 5
    assert answer(pipeline_even, replace(problem, num_blocks=3)).blocks == (1, 1, 1, 0)


def test_titanic_splits_blocks_by_speed() -> None:
    problem = ClusterProblem(devices_with([1, 2, 3]), 12, 64, 64, "bound")
    assert answer(titanic, problem).blocks == (2, 4, 6)
    assert answer(titanic, problem).num_micro_batches == 8
    # A device that is far slower than the others gets no block.
    slow = replace(problem, devices=devices_with([0.01, 2, 2]), num_blocks=5)
    assert answer(titanic, slow).blocks == (0, 3, 2)


def test_titanic_counts_the_time_per_micro_batch() -> None:
    """With eight samples per micro-batch, 8u + v is 2 s on device a and 1 s on device b."""
    laws = [AffineLaw(0.125, 1.0, 0.0, 0.0), AffineLaw(0.125, 0.0, 0.0, 0.0)]
    devices = tuple(DeviceProfile(name, law) for name, law in zip("ab", laws, strict=True))
    assert answer(titanic, ClusterProblem(devices, 6, 64, 64, "bound")).blocks == (2, 4)


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_titanics_shares_are_within_a_block_of_their_quota(
    speeds: list[float], num_blocks: int
) -> None:
    problem = ClusterProblem(devices_with(speeds), num_blocks, 64, 64, "bound")
    blocks = np.array(answer(titanic, problem).blocks)
    quotas = num_blocks * np.array(speeds) / sum(speeds)
    assert (np.abs(blocks - quotas) < 1).all()
    faster = np.array(speeds)[:, None] > np.array(speeds)
    assert (blocks[:, None] >= blocks)[faster].all()


def test_titanic_gives_all_blocks_to_devices_that_take_no_time() -> None:
    free = DeviceProfile("free", AffineLaw(0.0, 0.0, 0.0, 1.0))
    problem = ClusterProblem((free, *devices_with([1.0]), free), 7, 8, 8, "bound")
    assert answer(titanic, problem).blocks == (4, 0, 3)


@each_law
def test_without_segment_scheduling_only_s_and_m_are_optimal(latency: Latency) -> None:
    problem = cluster(0, latency, 6, 12)
    best = exact_partition(problem).best
    answers = [answer(no_segment_scheduling, problem, seed) for seed in range(10)]
    for each in answers:
        held = [blocks for blocks in each.blocks if blocks]
        assert len(held) == best.num_segments
        assert max(held) - min(held) <= 1
        assert each.num_micro_batches == best.num_micro_batches
    assert len({each.blocks for each in answers}) > 1
    assert answers[3] == answer(no_segment_scheduling, problem, 3)


@each_law
def test_gpipe_has_the_best_micro_batches(latency: Latency) -> None:
    for seed in range(5):
        problem = cluster(seed, latency, 3, 7)
        best = answer(gpipe, problem)
        assert best.blocks == (3, 2, 2)
        assert best.latency_s == min(latency_of(problem, (3, 2, 2), m) for m in range(1, 13))


def test_the_error_distinguishes_little_energy_from_little_memory() -> None:
    law = AffineLaw(1.0, 0.0, 0.0, 0.0)
    poor = DeviceProfile("poor", law, 3, EnergyBudget(8.0, law))
    problem = ClusterProblem((poor, DeviceProfile("other", law)), 4, 8, 1, "overlap")
    with pytest.raises(InfeasibleRoundError, match=r"poor .*at most 1 fit its energy budget"):
        pipeline_even(problem, np.random.default_rng(0))


def test_gpipe_uses_only_micro_batches_that_energy_allows() -> None:
    """A block takes 1 J per sample, and one device may spend at most 2 J per micro-batch."""
    devices = devices_with([1, 1])
    budget = EnergyBudget(2.0, AffineLaw(1.0, 0.0, 0.0, 0.0), "micro_batch")
    slow_hop = replace(devices[0].time, ell=100.0)
    first = replace(devices[0], time=slow_hop, energy=budget)
    best = answer(gpipe, ClusterProblem((first, devices[1]), 2, 8, 8, "bound"))
    assert best.num_micro_batches == 4


@each_law
def test_pipedream_is_the_best_contiguous_split(latency: Latency) -> None:
    for seed in range(8):
        problem = cluster(seed, latency, capped=True)
        for m in (1, 5):
            stages = stage_times(problem, m)
            stages = stages[np.isfinite(stages[:, 0])]
            whole = whole_splits(stages, least=1)
            if not whole:
                continue
            blocks = slowest_stage_split(stages)
            assert sum(blocks) == problem.num_blocks
            assert slowest(stages, tuple(blocks)) == min(slowest(stages, each) for each in whole)


@each_law
def test_pipedream_uses_every_device_and_the_best_micro_batches(latency: Latency) -> None:
    problem = cluster(2, latency)
    best = answer(pipedream, problem)
    assert min(best.blocks) >= 1
    others = [
        latency_of(problem, tuple(slowest_stage_split(stage_times(problem, m))), m)
        for m in range(1, 13)
    ]
    assert best.latency_s == min(others)


def test_pipedream_leaves_out_a_device_that_can_hold_no_block() -> None:
    first, *rest = devices_with([5, 1, 1])
    problem = ClusterProblem((replace(first, max_blocks=0), *rest), 4, 8, 8, "bound")
    assert answer(pipedream, problem).blocks == (0, 2, 2)


@each_law
def test_pipeedge_is_the_best_subset(latency: Latency) -> None:
    for seed in range(8):
        problem = cluster(seed, latency, capped=True)
        for m in (1, 5):
            stages = stage_times(problem, m)
            whole = whole_splits(stages, least=0)
            if not whole:
                continue
            least = min(slowest(stages, blocks) for blocks in whole)
            fewest = min(
                sum(held > 0 for held in blocks)
                for blocks in whole
                if slowest(stages, blocks) == least
            )
            chosen = best_subset(stages)
            assert len(chosen) == fewest
            assert slowest(stages[chosen], tuple(slowest_stage_split(stages[chosen]))) == least


def test_pipeedge_leaves_a_slow_device_out() -> None:
    problem = ClusterProblem(devices_with([4, 0.1, 4]), 4, 8, 8, "bound")
    assert answer(pipeedge, problem).blocks == (2, 0, 2)


def test_pipeedge_refuses_more_than_twelve_devices() -> None:
    problem = ClusterProblem(devices_with([1.0] * 13), 13, 8, 2, "bound")
    with pytest.raises(InfeasibleRoundError, match="13 devices, at most 12"):
        answer(pipeedge, problem)


@each_law
def test_one_more_micro_batch_takes_one_slowest_stage(latency: Latency) -> None:
    """The additional micro-batch has the same size as the others."""
    problem, blocks = cluster(1, latency), (1, 3, 0, 2)
    stages = stage_times(problem, 4)
    longer = pipeline_latency(problem.devices, blocks, 5 / 4 * problem.batch_size, 5, latency)
    gained = longer - latency_of(problem, blocks, 4)
    assert gained == pytest.approx(slowest(stages, blocks))


def whole_splits(stages: np.ndarray, least: int) -> list[tuple[int, ...]]:
    """Return all splits of L blocks with at least ``least`` on each device, within its cap."""
    num_blocks = stages.shape[1]
    caps = np.isfinite(stages).sum(axis=1).tolist()
    splits = itertools.product(*(range(least, cap + 1) for cap in caps))
    return [blocks for blocks in splits if sum(blocks) == num_blocks]


def slowest(stages: np.ndarray, blocks: tuple[int, ...]) -> float:
    held = [times[count - 1] for times, count in zip(stages, blocks, strict=True) if count]
    return float(max(held, default=math.inf))


def test_stage_times_are_finite_only_within_the_caps() -> None:
    problem = cluster(0, "bound", capped=True)
    for m in (1, 7, 12):
        caps = np.isfinite(stage_times(problem, m)).sum(axis=1)
        assert (caps == block_caps(problem)[m - 1]).all()
