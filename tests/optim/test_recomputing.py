"""Devices that recompute are chosen as well as by trying every combination."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from made_request import request_for

from collapipe.errors import ConfigError, InfeasibleRoundError, PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import (
    AffineLaw,
    BlockCost,
    Channel,
    ClusterState,
    DeviceProfile,
    MemoryBudget,
    SharingLaw,
    Uplink,
)
from optim.baselines import EvenSplit
from optim.dssra import Dssra
from optim.latency import batch_s
from optim.library import plan_cluster
from optim.partition.baselines import vanilla_fl
from optim.partition.exact import exact_partition
from optim.problem import LATENCIES, ClusterProblem, ClusterSolver
from optim.sharing.exact import shared_partition
from optim.sharing.modes import either_caps, held_in_order, needing
from optim.solvers import cluster_solver
from optim.verified import solve_verified
from optim.verify import verify_plan
from optim.verify.cluster import check_point
from tests.optim.uplink_times import sampled_times, solved
from tests.thorough import cases, chosen

TWICE = 4 / 3  # the factor of a block's time


def memory_of(cost: BlockCost, limit_bytes: float) -> MemoryBudget:
    own = cost.segment_bytes, cost.block_bytes, cost.sample_bytes
    of_batch = cost.batch_segment_bytes, cost.batch_block_bytes
    return MemoryBudget(limit_bytes, *own, *of_batch, cost.trained_bytes)


def drawn(rng: np.random.Generator) -> ClusterProblem:
    """Draw devices with memory for few blocks; most of them can recompute."""
    num_devices, num_blocks = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    batch, weights, inputs = int(rng.integers(1, 7)), rng.uniform(0, 4), rng.uniform(0, 2)
    saved, trained = rng.uniform(0, 3), rng.uniform(0, 2)
    plain = BlockCost(
        *(1.0, 1.0, 1.0, 1.0),
        block_bytes=weights + batch * saved,
        batch_block_bytes=batch * saved,
        trained_bytes=trained,
    )
    smaller = replace(
        plain,
        block_bytes=weights,
        sample_bytes=saved,
        segment_bytes=batch * inputs,
        batch_segment_bytes=batch * inputs,
        batch_block_bytes=0.0,
    )
    devices = []
    for k in range(num_devices):
        law = AffineLaw(*map(float, rng.uniform(0, 1, 4) * (1.0, 0.5, 0.3, 0.3)))
        limit = float(rng.uniform(0.3, 1.2) * num_blocks * (weights + batch * saved))
        memory = memory_of(plain, limit)
        sharing = SharingLaw(float(rng.uniform(0, 0.5)), memory=memory)
        device = DeviceProfile(f"device-{k}", law, memory=memory, sharing=sharing)
        if rng.random() < 0.8:
            small = replace(device, memory=memory_of(smaller, limit))
            device = device.or_recomputing(TWICE, small)
        devices.append(device)
    times = ((0.0,), (0.0, 1.0, 4.0), (0.0, math.inf))[int(rng.integers(3))]
    return ClusterProblem(
        tuple(devices),
        num_blocks,
        batch,
        batch,
        LATENCIES[int(rng.integers(3))],
        activation_s=times,
        in_flight=() if rng.random() < 0.5 else (num_devices + 1,),
    )


def all_modes(
    problem: ClusterProblem, solver: ClusterSolver, times: Sequence[float] = (0.0,)
) -> list[float]:
    """Return the time of the fastest plan among all combinations, for each uplink time; infinite if
    no plan fits."""
    found, may = [math.inf] * len(times), [{False, bool(d.recomputing)} for d in problem.devices]
    for modes in itertools.product(*may):
        devices = tuple(d.in_mode(on) for d, on in zip(problem.devices, modes, strict=True))
        try:
            front = solver(replace(problem, devices=devices), np.random.default_rng(0)).front
        except InfeasibleRoundError:
            continue
        for k, time_s in enumerate(times):
            found[k] = min(found[k], *(batch_s(each, time_s) for each in front))
    return found


@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
@pytest.mark.parametrize("seed", chosen(range(4), range(1)))
def test_no_combination_is_faster(seed: int, solver: ClusterSolver) -> None:
    """This holds for all uplink times. Every point of the front fits in memory."""
    recomputing = 0
    for number in range(cases(20, 40)):
        problem = drawn(np.random.default_rng((seed, number)))
        solution = solved(problem, solver, all_modes(problem, solver, sampled_times(problem)))
        if solution is None:
            continue
        for point in solution.front:
            assert point.recomputing == needing(problem, point)
            check_point(point, problem)
        recomputing += bool(solution.best.recomputing)
    assert recomputing


def test_each_number_of_segments_has_its_fastest_plan() -> None:
    for number in range(cases(15, 60)):
        problem = drawn(np.random.default_rng(number))
        problem = replace(problem, activation_s=(0.0,))
        for most in range(1, len(problem.devices) + 1):

            def few(own: ClusterProblem, rng: np.random.Generator, most: int = most):  # type: ignore[no-untyped-def]
                solution = exact_partition(own, rng)
                kept = tuple(each for each in solution.front if each.num_segments <= most)
                if not kept:
                    raise InfeasibleRoundError("more segments are needed")
                return replace(solution, front=kept)

            (expected,) = all_modes(problem, few)
            try:
                front = solve_verified(problem, exact_partition, np.random.default_rng(0)).front
            except InfeasibleRoundError:
                assert math.isinf(expected)
                continue
            times = [each.latency_s for each in front if each.num_segments <= most]
            assert min(times, default=math.inf) == pytest.approx(expected, rel=1e-9)


def test_caps_are_the_larger_of_both_modes() -> None:
    for number in range(60):
        problem = drawn(np.random.default_rng(number))
        caps = either_caps(problem)
        for (row, k), most in np.ndenumerate(caps):
            both = (problem.devices[k].in_mode(on) for on in (False, True))
            size, kept = problem.batch_size / (row + 1), problem.kept(row + 1)
            assert most == max(each.memory_cap(size, problem.num_blocks, kept) for each in both)


def test_the_bound_holds_after_a_limit_of_nodes() -> None:
    """A solution that is reported as complete is optimal."""
    incomplete, hurried = 0, partial(exact_partition, max_nodes=0)
    for number in range(60):
        problem = replace(drawn(np.random.default_rng(number)), activation_s=(0.0,))
        (best_s,) = all_modes(problem, exact_partition)
        try:
            solution = solve_verified(problem, hurried, np.random.default_rng(0))
        except InfeasibleRoundError:
            continue
        assert solution.certificate.lower_bound <= best_s * (1 + 1e-9)
        assert solution.best.latency_s >= best_s * (1 - 1e-9)
        for on in (False, True):  # not worse than if all or no devices recompute
            devices = tuple(each.in_mode(on) for each in problem.devices)
            try:
                other = hurried(replace(problem, devices=devices)).best
            except InfeasibleRoundError:
                continue
            assert solution.best.latency_s <= other.latency_s * (1 + 1e-9)
        incomplete += not solution.complete
        if solution.complete:
            assert solution.best.latency_s == pytest.approx(best_s)
    assert incomplete


@pytest.mark.parametrize("name", ["titanic", "pipedream", "no_segment_scheduling", "adaptis"])
def test_rules_without_a_bound_let_all_or_no_devices_recompute(name: str) -> None:
    """Both plans use the same random draws, and the faster one is chosen."""
    solver = cluster_solver(name)
    for number in range(30):
        problem = replace(drawn(np.random.default_rng(number)), activation_s=(0.0,))
        expected = []
        for on in (False, True):
            devices = tuple(each.in_mode(on) for each in problem.devices)
            try:
                own = solver(replace(problem, devices=devices), np.random.default_rng(0))
            except InfeasibleRoundError:
                continue
            expected.append(own.best.latency_s)
        try:
            solution = solve_verified(problem, solver, np.random.default_rng(0))
        except InfeasibleRoundError:
            assert not expected
            continue
        assert solution.best.latency_s <= min(expected) * (1 + 1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"times": 0.5},
        {"times": 1e18},
        {"limit_bytes": 7.0},
        {"batch_block_bytes": 60.0},
        {"memory": None},
        {"sharing": SharingLaw(0.1)},
    ],
    ids=str,
)
def test_impossible_choices_are_refused(change: dict[str, Any]) -> None:
    """A unit may report any profile."""
    memory = MemoryBudget(100.0, 0.0, 6.0, 0.0)
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=memory)
    smaller = replace(device, memory=replace(memory, block_bytes=2.0))
    assert device.or_recomputing(TWICE, smaller).recomputing
    own, times = dict(change), change.get("times", TWICE)
    own.pop("times", None)
    with pytest.raises(ConfigError, match=r"ecomputing|MemoryBudget"):
        if {"limit_bytes", "batch_block_bytes"} & own.keys():
            smaller = replace(smaller, memory=replace(memory, **own))
            own = {}
        made = device.or_recomputing(times, smaller)
        replace(made, **own)


def test_extreme_profiles_do_not_make_planning_fail() -> None:
    law = AffineLaw(1e-18, 1e6, 0.0, 0.0)
    for bytes_ in (0.0, 1e-18, 1e18):
        memory = MemoryBudget(1e18, 0.0, bytes_, bytes_, 0.0, bytes_, bytes_)
        device = DeviceProfile("a", law, memory=memory)
        device = device.or_recomputing(
            2.0, replace(device, memory=replace(memory, sample_bytes=0.0))
        )
        problem = ClusterProblem((device,), 2, 4, 4, "overlap")
        with suppress(InfeasibleRoundError):
            solve_verified(problem, exact_partition, np.random.default_rng(0))


def test_a_long_uplink_may_favour_a_slower_plan_that_recomputes() -> None:
    """The plan's stages are slower than in any plan without recomputing."""
    plain = MemoryBudget(6.0, 0.0, 8.0, 0.0, 0.0, 6.0)
    smaller = DeviceProfile(
        "a", AffineLaw(0.0, 0.5, 1.5, 1.0), memory=MemoryBudget(6.0, 0.0, 1.6, 0.0, 0.0, 1.5)
    )
    device = replace(smaller, memory=plain).or_recomputing(2.0, smaller)
    times, rng = (0.0, math.inf), np.random.default_rng(0)
    problem = ClusterProblem((device,), 4, 6, 6, "overlap", times, in_flight=(2,))
    front = solve_verified(problem, exact_partition, rng).front
    assert min(batch_s(each, 24.0) for each in front) == pytest.approx(30.5)


def test_at_most_ten_different_devices_are_searched_exactly() -> None:
    """Of more devices, those that hold the most blocks are searched. The bound holds, and the
    solution is not complete."""
    found = 0
    for number in range(40):
        rng = np.random.default_rng(number)
        own, of_batch = rng.uniform(0.5, 2, (2, 12))
        rooms, speeds = rng.uniform(0.8, 1.7, (2, 12)) * (own + of_batch, np.ones(12))
        devices = tuple(
            DeviceProfile(
                f"d{k}",
                AffineLaw(speeds[k], 0.1, 0.0, 0.01),
                memory=MemoryBudget(rooms[k], 0.0, own[k] + of_batch[k], 0.0, 0.0, of_batch[k]),
            )
            for k in range(12)
        )
        problem = ClusterProblem(devices, 12, 8, 8, "overlap", in_flight=tuple(range(1, 13)))
        try:
            solution = solve_verified(problem, exact_partition, np.random.default_rng(0))
        except InfeasibleRoundError:
            continue
        found += not solution.complete
        assert solution.best in solution.front
        assert solution.certificate.lower_bound <= solution.best.latency_s
    assert found


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [
        (14, r"hold at most 13 of 14 blocks .*\(d0: 2 by memory, .*, d11: 1 by memory"),
        (12, "^12 devices are too many to try all orders; the 10 that hold most blocks: "),
    ],
)
def test_errors_count_all_devices_or_say_how_many_were_tried(
    num_blocks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 12 different devices holds one block; the first holds two if it is the last stage."""
    monkeypatch.setattr("optim.verified._possible", lambda *_: [])
    devices = tuple(
        DeviceProfile(
            f"d{k}",
            AffineLaw(1.0 + k, 0.1, 0.0, 0.0),
            memory=MemoryBudget(limit, 0.0, 9.8, 0.0, 0.0, 0.8),
        )
        for k, limit in enumerate([19.0, *[10.0] * 11])
    )
    problem = ClusterProblem(devices, num_blocks, 8, 8, "overlap", in_flight=tuple(range(1, 13)))
    with pytest.raises(InfeasibleRoundError, match=message):
        solve_verified(problem, exact_partition, np.random.default_rng(0))


def test_replicas_stay_the_solution_if_devices_may_recompute() -> None:
    """The solution is not treated as a pipeline of K stages."""
    plain = MemoryBudget(100.0, 0.0, 6.0, 0.0, 0.0, 5.0)
    smaller = DeviceProfile(
        "a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=replace(plain, block_bytes=5.0)
    )
    device = replace(smaller, memory=plain).or_recomputing(TWICE, smaller)
    devices = device, replace(device, name="b")
    problem = ClusterProblem(devices, 2, 4, 4, "overlap", in_flight=(2, 3))
    solution = solve_verified(problem, vanilla_fl, np.random.default_rng(0))
    assert solution.best.replicated and solution.front == (solution.best,)


def test_replicas_do_not_recompute() -> None:
    """Without recomputing the whole encoder does not fit, so planning fails."""
    plain = MemoryBudget(10.0, 0.0, 6.0, 0.0)
    smaller = DeviceProfile(
        "a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=replace(plain, block_bytes=1.0)
    )
    device = replace(smaller, memory=plain).or_recomputing(TWICE, smaller)
    problem = ClusterProblem((device,), 2, 4, 4, "overlap")
    with pytest.raises(InfeasibleRoundError):
        solve_verified(problem, vanilla_fl, np.random.default_rng(0))


def test_plans_name_the_devices_that_recompute() -> None:
    """Only the small device recomputes, which lets it hold more blocks. A round's plan names it,
    too."""
    law, roomy = AffineLaw(1.0, 0.0, 0.01, 0.0), MemoryBudget(100.0, 0.0, 6.0, 0.0)
    large = DeviceProfile("large", law, memory=roomy)
    tight = replace(large, name="small", memory=replace(roomy, limit_bytes=6.0))
    devices = tuple(
        each.or_recomputing(TWICE, replace(each, memory=replace(each.memory, block_bytes=2.0)))  # type: ignore[type-var]
        for each in (large, tight)
    )
    devices = (replace(devices[0], max_blocks=3), devices[1])
    planned = plan_cluster(devices, num_blocks=6, batch_size=4)
    assert [each.recomputing for each in planned.segments] == [(), ("small",)]
    cluster = ClusterState(0, devices, 4, Uplink(0.5, 10.0, 1e6, 2e6, (1.0,)))
    request = request_for([cluster], 6, 4, 4, channels=(Channel(5e5, 0.07, 4e-21),))
    plan = Dssra().plan_round(request, np.random.default_rng(0))
    verify_plan(plan, request)
    (cluster,) = plan.clusters
    assert [each.recomputing for each in cluster.segments] == [(), ("small",)]
    unknown = replace(plan, clusters=(replace(cluster, schedule="auto"),))
    with pytest.raises(PlanViolationError, match="schedule: auto, must be one_f_one_b"):
        verify_plan(unknown, request)
    (even,) = EvenSplit().plan_round(request, np.random.default_rng(0)).clusters
    assert [each.recomputing for each in even.segments] == [(), ("small",)]
    verify_plan(RoundPlan(1, (even,)), request)
    without = ClusterPlan(
        0, tuple(replace(each, recomputing=()) for each in cluster.segments), 4, "gpipe"
    )
    assert without.in_modes({each.name: each for each in devices})["small"].memory == tight.memory


def test_the_most_blocks_are_those_of_the_best_order() -> None:
    """Place 1 is the last; a device there keeps the fewest micro-batches."""
    differ = 0
    for seed in range(cases(40, 400)):
        problem = replace(drawn(np.random.default_rng(seed)), in_flight=(1, 2, 3))
        devices = range(len(problem.devices))
        caps = [either_caps(problem.at(place + 1)) for place in devices]
        by_order = [
            np.array([caps[place][:, k] for place, k in enumerate(order)]).T
            for order in itertools.permutations(devices)
        ]
        totals, (m, held) = held_in_order(problem)
        sums = np.array([each.sum(axis=1) for each in by_order])
        assert totals[-1].tolist() == sums.max(axis=0).tolist()
        assert sum(held) == sums.max()
        named = [
            [each[m - 1, order.index(k)] for k in devices]
            for each, order in zip(by_order, itertools.permutations(devices), strict=True)
        ]
        assert held in named
        differ += len({*sums.max(axis=1)}) > 1
    assert differ
