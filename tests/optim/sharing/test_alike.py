"""Merging similar devices into one kind gives valid lower bounds and plans."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget, SharingLaw
from optim.latency import batch_s
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem
from optim.sharing import exact
from optim.sharing.alike import as_kinds, similar_kinds
from optim.sharing.exact import shared_partition
from optim.sharing.states import kinds_of, num_pairs
from optim.verify import verify_cluster
from tests.optim.sharing.instances import drawn
from tests.thorough import chosen


def of_one_form(problem: ClusterProblem) -> ClusterProblem:
    """Return the problem in which rows and blocks take the first device's memory on all devices."""
    like, devices = problem.devices[0], list[DeviceProfile]()
    for each in problem.devices:
        limit = each.memory.limit_bytes if each.memory else 3.0 * problem.num_blocks
        memory = like.memory and replace(like.memory, limit_bytes=limit)
        sharing = each.sharing and replace(each.sharing, max_blocks=None, memory=memory)
        devices.append(replace(each, max_blocks=None, memory=memory, sharing=sharing))
    return replace(problem, devices=tuple(devices))


@pytest.mark.parametrize("seed", chosen(range(20), [1]))
def test_bounds_of_merged_kinds_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of up to five devices are treated as too large to search exactly."""
    merged = shared = 0
    for number in range(60):
        problem = drawn(np.random.default_rng((seed, number)), most_devices=5)
        problem = of_one_form(problem) if number % 3 else problem
        monkeypatch.setattr(exact, "MOST_PAIRS", 2**17)
        try:
            best = shared_partition(problem).best
        except InfeasibleRoundError:
            continue
        if num_pairs(tuple(map(len, kinds_of(problem.devices)))) <= 36:
            continue
        monkeypatch.setattr(exact, "MOST_PAIRS", 36)
        monkeypatch.setattr(exact, "_MOST_MERGED", 36)
        try:
            found = shared_partition(problem)
        except InfeasibleRoundError as error:
            assert "too many" in str(error)
            continue
        verify_cluster(found, problem)
        least_s = batch_s(best, problem.activation_s[0])
        assert found.certificate.lower_bound <= least_s * (1 + 1e-9)
        assert found.certificate.objective >= least_s * (1 - 1e-9)
        if not found.complete:
            check_both_ends(found.certificate, problem)
        merged += found.certificate.lower_bound > 0
        shared += found.best.shares
    assert merged > 5 and shared


@pytest.mark.parametrize("number", [182, 404, 587, 1228])
def test_the_worst_devices_plans_are_considered(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these draws they are faster than the best devices' plans that the real devices can
    hold."""
    problem = of_one_form(drawn(np.random.default_rng((9, number)), most_devices=5))
    monkeypatch.setattr(exact, "MOST_PAIRS", 36)
    monkeypatch.setattr(exact, "_MOST_MERGED", 36)
    found = shared_partition(problem)
    verify_cluster(found, problem)
    check_both_ends(found.certificate, problem)


def check_both_ends(certificate: Certificate, problem: ClusterProblem) -> None:
    """Check that the bound is at least the best devices', and the plan no slower than the worst
    ones'."""
    devices = sorted(problem.devices, key=lambda each: each.time.chunk(1, problem.batch_size))
    own = replace(problem, devices=tuple(devices), activation_s=problem.activation_s[:1])
    for best in (True, False):
        with suppress(InfeasibleRoundError):
            merged = shared_partition(as_kinds(own, similar_kinds(own, 36) or (), best)).certificate
            bound_s = min(merged.lower_bound, certificate.objective)
            assert not best or certificate.lower_bound >= bound_s * (1 - 1e-9)
            assert best or certificate.objective <= merged.objective * (1 + 1e-9)


@pytest.mark.parametrize("best", [True, False])
def test_merged_devices_are_the_best_or_the_worst_in_each_respect(best: bool) -> None:
    budget, law = MemoryBudget(8.0, 1.0, 1.0, 0.1), AffineLaw(1.0, 0.1, 0.2, 0.3)
    one = DeviceProfile("a", law, memory=budget, sharing=SharingLaw(0.5, memory=budget))
    small = replace(budget, limit_bytes=4.0)
    other = replace(one, name="b", time=AffineLaw(0.5, 0.2, 0.1, 0.4), memory=small)
    other = replace(other, sharing=SharingLaw(0.6, memory=small))
    joules = EnergyBudget(9.0, law, sync_j=0.1), EnergyBudget(7.0, law, sync_j=0.2)
    one = replace(one, max_blocks=5, energy=joules[0])
    other = replace(other, max_blocks=3, energy=joules[1])
    problem = ClusterProblem((one, other), 4, 8, 4, "overlap")
    a, b = as_kinds(problem, [[0, 1]], best).devices
    assert b == replace(a, name="b")
    assert a.time == (AffineLaw(0.5, 0.1, 0.1, 0.3) if best else AffineLaw(1.0, 0.2, 0.2, 0.4))
    memory = budget if best else small
    assert (a.max_blocks, a.energy) == ((5, joules[0]) if best else (3, joules[1]))
    assert a.memory == memory and a.sharing == SharingLaw(0.5 if best else 0.6, memory=memory)


def test_the_most_similar_devices_are_merged_first() -> None:
    """Devices whose blocks take different memory are not merged."""
    speeds = (1.0, 5.0, 1.01, 5.2, 20.0)
    budget, laws = MemoryBudget(50.0, 0.0, 1.0, 0.0), [AffineLaw(u, 0.0, 0.1, 0.0) for u in speeds]
    devices = [
        DeviceProfile(f"d{k}", law, memory=budget, sharing=SharingLaw(0.1))
        for k, law in enumerate(laws)
    ]
    problem = ClusterProblem(tuple(devices), 4, 8, 4, "overlap")
    for most, expected in ((243, 5), (162, 4), (108, 3), (60, 2), (21, 1)):
        kinds = similar_kinds(problem, most)
        assert kinds is not None and len(kinds) == expected
        assert num_pairs(tuple(map(len, kinds))) <= most
    assert similar_kinds(problem, 108) == [[0, 2], [1, 3], [4]]
    devices[2] = replace(devices[2], memory=replace(budget, block_bytes=1.5))
    apart = replace(problem, devices=tuple(devices))
    assert similar_kinds(apart, 162) == [[0], [1, 3], [2], [4]]
    assert similar_kinds(apart, 21) is None


def test_devices_with_similar_memory_are_merged() -> None:
    """The memory limits whole segments or shared stages."""
    law, rooms = AffineLaw(1.0, 0.0, 0.1, 0.0), (3.0, 9.0, 3.1)
    for alone in (True, False):
        devices = []
        for k, room in enumerate(rooms):
            budget = MemoryBudget(room, 0.0, 1.0, 0.5)
            limits = (budget, None) if alone else (None, budget)
            sharing = SharingLaw(0.1, memory=limits[1])
            devices.append(DeviceProfile(f"d{k}", law, memory=limits[0], sharing=sharing))
        problem = ClusterProblem(tuple(devices), 8, 8, 4, "overlap")
        assert similar_kinds(problem, 18) == [[0, 2], [1]]


@pytest.mark.parametrize(
    "limits",
    [
        {"energy": EnergyBudget(9.0, AffineLaw(1.0, 0.0, 0.0, 0.0), "micro_batch")},
        {"energy": None},
        {"max_blocks": 3},
        {"sharing": SharingLaw(0.1, max_blocks=3)},
        {"sharing": None},
    ],
)
def test_devices_with_different_kinds_of_limits_are_not_merged(limits: dict[str, Any]) -> None:
    energy = EnergyBudget(9.0, AffineLaw(1.0, 0.0, 0.0, 0.0), "batch")
    law = AffineLaw(1.0, 0.0, 0.1, 0.0)
    one = DeviceProfile("a", law, energy=energy, sharing=SharingLaw(0.1))
    pair = one, replace(one, name="b", time=replace(law, u=2.0))
    problem = ClusterProblem(pair, 4, 8, 4, "overlap")
    assert similar_kinds(problem, 6) == [[0, 1]]
    assert similar_kinds(replace(problem, devices=(pair[0], replace(pair[1], **limits))), 6) is None


def test_a_plan_that_the_real_devices_cannot_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fast devices hold few blocks, but the best device of their kind is fast and holds all."""
    speeds, limits, sharing = (0.1, 0.11, 1.0, 1.1), (1, 1, 4, 4), SharingLaw(0.2, 0)
    devices = tuple(
        DeviceProfile(f"d{k}", AffineLaw(u, 0.0, 0.1, 0.0), most, sharing=sharing)
        for k, (u, most) in enumerate(zip(speeds, limits, strict=True))
    )
    problem = ClusterProblem(devices, 4, 4, 1, "overlap")
    best = shared_partition(problem).best
    monkeypatch.setattr(exact, "MOST_PAIRS", 15)
    monkeypatch.setattr(exact, "_MOST_MERGED", 15)
    found = shared_partition(problem)
    verify_cluster(found, problem)
    assert found.best.latency_s == pytest.approx(best.latency_s)


def twelve() -> ClusterProblem:
    """Return twelve different devices; the model fits no single device and no stage of all
    devices."""
    rng = np.random.default_rng(0)
    devices = []
    for k, u in enumerate(rng.uniform(0.8, 1.2, 12).tolist()):
        memory = MemoryBudget(4.0, 0.0, 1.4, 0.0, 0.0, 0.9, 0.05)
        sharing = SharingLaw(0.01, memory=memory)
        law = AffineLaw(u, 0.05, 0.5, 0.1)
        devices.append(DeviceProfile(f"d{k}", law, memory=memory, sharing=sharing))
    return ClusterProblem(tuple(devices), 12, 24, 12, "flow_shop")


def test_twelve_different_devices_share_stages_if_memory_is_scarce() -> None:
    problem = twelve()
    found = shared_partition(problem)
    verify_cluster(found, problem)
    assert found.best.num_segments > 1 and found.best.shares
    assert found.best.latency_s < 0.9 * exact_partition(problem).best.latency_s
    assert 0 < found.certificate.gap < 0.1 and not math.isinf(found.certificate.lower_bound)


def test_a_limit_of_nodes_reduces_the_number_of_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower bound is still valid."""
    counts = list[int]()

    def counted(problem: ClusterProblem, most_pairs: int) -> list[list[int]] | None:
        kinds = similar_kinds(problem, most_pairs)
        counts.append(len(kinds or ()))
        return kinds

    monkeypatch.setattr(exact, "similar_kinds", counted)
    free, limited = (shared_partition(twelve(), max_nodes=nodes) for nodes in (math.inf, 24_000))
    assert counts[0] > counts[1] > 1
    verify_cluster(limited, twelve())
    assert limited.certificate.lower_bound <= free.best.latency_s
