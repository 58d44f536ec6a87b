"""On real devices, later rounds keep the micro-batches and shares of the first plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from made_request import request_for
from step_laws import law_of, stages_of

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, Link, MemoryBudget, SharingLaw
from collapipe.step_law import HeldStage, MeasuredPlan, StepLaw
from optim.baselines import AllUnits
from optim.cluster.problem import cluster_problem
from optim.cost import round_cost
from optim.planner import RoundRequest
from optim.problem import stages_of_plan
from optim.sharing.law import largest_rows
from optim.sharing.modes import decided
from optim.step import schedules
from optim.verified import is_possible
from optim.verify import verify_plan
from tests.thorough import cases

NAMES, BLOCKS, ROWS = "abcd", 6, 8
ALONE = ClusterPlan(0, (SegmentPlan("a", Span(0, 3)), SegmentPlan("b", Span(3, 3))), 2, "gpipe")
SHARED = ClusterPlan(
    0,
    (
        SegmentPlan("a", Span(0, 4), (Share("a", 3), Share("b", 1))),
        SegmentPlan("c", Span(4, 2)),
    ),
    2,
    "gpipe",
)
LAW = law_of(NAMES, m=2, apart=True, stages=stages_of({"a": 6}))


def request_of(
    kept: ClusterPlan | None,
    law: StepLaw | None = LAW,
    limits: Mapping[str, int] = {},
    row_s: Mapping[str, float] = {},
) -> RoundRequest:
    """Return a round after one with the plan ``kept``.

    Devices hold at most ``limits`` blocks and take ``row_s`` for a row of a block, by default half
    a second.
    """
    devices = tuple(
        DeviceProfile(
            name,
            AffineLaw(row_s.get(name, 0.5), 0.0, 0.0, 0.0),
            max_blocks=limits.get(name),
            sharing=SharingLaw(1e-3, limits.get(name)),
        )
        for name in NAMES
    )
    cluster = ClusterState(0, devices, 100, real_devices=True, step=law)
    earlier = (kept,) if kept else ()
    return request_for([cluster], BLOCKS, ROWS, ROWS, "gpipe", round=2, kept=earlier)


def planned(request: RoundRequest, partition: str = "shared") -> ClusterPlan:
    """Return the verified plan, whose time equals its computed cost."""
    plan = AllUnits(partition=partition).plan_round(request, np.random.default_rng(0))
    verify_plan(plan, request)
    (cost,) = round_cost(plan, request, "overlap", "none", "streamed").clusters
    (cluster,) = plan.clusters
    assert cost.pipeline_s == pytest.approx(cluster.latency_s)
    return cluster


@pytest.mark.parametrize("kept", [ALONE, SHARED])
@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_sums_depends_on_neither_times_nor_lost_devices(
    kept: ClusterPlan, seed: int
) -> None:
    """The micro-batches and the shares of the same blocks stay, even if up to two devices are
    absent."""
    rng = np.random.default_rng(seed)
    away = dict.fromkeys(rng.choice([*NAMES], rng.integers(3), replace=False).tolist(), 0)
    row_s = dict(zip(NAMES, rng.uniform(0.01, 2.0, 4).tolist(), strict=True))
    law = law_of(
        NAMES,
        m=int(rng.choice([1, 2, 4])),
        apart=bool(rng.integers(2)),
        cores=int(rng.integers(1, 4)),
        send_s=rng.uniform(0, 2),
        head_s=rng.uniform(0, 2),
        spread=rng.uniform(0, 1),
        stages=[stages_of({"a": 6}), (HeldStage(("a", "b"), 6, (3, 1)),)][rng.integers(2)],
    )
    plan = planned(request_of(kept, rng.choice([law, None]), away, row_s))
    assert plan.order_of_sums == kept.order_of_sums
    assert not {*away} & {name for each in plan.segments for name in each.devices}


def test_a_device_that_returns_gets_its_share_back() -> None:
    without_b = planned(request_of(SHARED, limits={"b": 0}))
    assert [each.holders for each in without_b.segments] == ["(3 a, 1 a)", "c"]
    assert planned(request_of(SHARED)).segments == SHARED.segments


def test_a_stage_that_lost_its_devices_moves_to_the_fastest_free_one() -> None:
    plan = planned(request_of(SHARED, limits={"a": 0, "b": 0}, row_s={"d": 0.25}))
    assert [each.holders for each in plan.segments] == ["(3 d, 1 d)", "c"]


def test_two_devices_are_exchanged_if_the_gain_exceeds_the_interval() -> None:
    """Without measured times no devices are exchanged, because the inventory's times stay the
    same."""
    slow = {"a": 5.0}
    assert planned(request_of(SHARED, None, row_s=slow)).segments == SHARED.segments
    plan = planned(request_of(SHARED, row_s=slow))
    assert "a" not in plan.segments[0].devices[:1] and plan.order_of_sums == SHARED.order_of_sums
    for doubt, exchanged in ((0.01, True), (0.9, False)):
        law = replace(LAW, spread=doubt, spread_of_new=doubt)
        plan = planned(request_of(SHARED, law, row_s={"a": 0.7}))
        assert (plan.segments != SHARED.segments) == exchanged


def test_the_first_round_shares_stages_only_with_measured_times() -> None:
    assert planned(request_of(None)).shares
    assert not planned(request_of(None, None)).shares


def test_a_run_that_began_without_shared_stages_stays_without_them() -> None:
    """This holds although an earlier run measured a fast shared stage."""
    measured = MeasuredPlan((HeldStage(("a", "b"), 6, (2, 2)),), 2, 1e-3, "gpipe")
    law = replace(LAW, stages=measured.stages, measured=(measured,))
    for partition in ("shared", "exact"):
        assert not planned(request_of(ALONE, law), partition).shares
    assert planned(request_of(None, law)).shares


@pytest.mark.parametrize("m", [1, 4])
def test_measured_plans_with_other_micro_batches_are_ignored(m: int) -> None:
    """``device measure`` plans its trial run freely. The devices may recompute."""
    measured = MeasuredPlan((HeldStage(("a", "b"), 6, (1, 1)),), m, 1e-3, "gpipe")
    law = replace(LAW, measured=(MeasuredPlan(LAW.stages, 2, 1.0, "gpipe"), measured))
    (cluster,) = (request := with_memory(request_of(ALONE, law), (99, 99, 99, 99))).clusters
    devices = tuple(each.or_recomputing(4 / 3, each) for each in cluster.devices)
    request = replace(request, clusters=(replace(cluster, devices=devices),))
    for partition in ("shared", "exact"):
        assert planned(request, partition).order_of_sums == ALONE.order_of_sums


def test_a_law_of_another_model_does_not_make_planning_fail() -> None:
    """A unit may report stages of any number of blocks, on devices that may recompute."""
    for blocks in (1, 4000):
        law = replace(LAW, stages=(HeldStage(("a", "b"), blocks, (2, 2)),))
        (cluster,) = (request := with_memory(request_of(None, law), (99, 99, 99, 99))).clusters
        devices = tuple(each.or_recomputing(4 / 3, each) for each in cluster.devices)
        assert planned(replace(request, clusters=(replace(cluster, devices=devices),)))


def test_a_new_plan_is_made_if_no_devices_can_hold_the_kept_shares() -> None:
    small = dict.fromkeys(NAMES, 2)
    plan = planned(request_of(SHARED, limits=small))
    assert sum(each.span.blocks for each in plan.segments) == BLOCKS
    assert plan.order_of_sums != SHARED.order_of_sums


@pytest.mark.parametrize("over_limits", [False, True])
def test_vanilla_fl_keeps_its_rows(over_limits: bool) -> None:
    """The devices have no sharing law, and may have less memory than a replica needs."""
    (cluster,) = (request := request_of(None, None)).clusters
    memory = MemoryBudget(59.0 if over_limits else 90.0, 0.0, 10.0, 0.0)
    devices = (replace(each, sharing=None, memory=memory) for each in cluster.devices)
    cluster = replace(cluster, devices=tuple(devices))
    request = replace(request, clusters=(cluster,), partition="vanilla_fl")
    first = planned(request)
    assert first.over_limits == over_limits
    without = replace(cluster.devices[0], max_blocks=0)
    away = replace(cluster, devices=(without, *cluster.devices[1:]))
    plan = planned(replace(request, clusters=(away,), kept=(first,)))
    assert (plan.order_of_sums, plan.over_limits) == (first.order_of_sums, over_limits)
    assert [each.holders for each in plan.segments] == ["(2 b, 2 b, 2 c, 2 d)"]


def test_a_device_needs_memory_for_the_gradients_of_each_share() -> None:
    """Four blocks take 40 bytes. One share of three rows of four needs 15 more bytes for the other
    share's gradients. Both shares on one device need 16 for the second share's."""
    (cluster,) = (request := request_of(SHARED, None, {"d": 0})).clusters
    for limit, holds in ((55.5, False), (56.0, True)):
        memory = MemoryBudget(limit, 0.0, 10.0, 0.0, trained_bytes=4.0)
        devices = tuple(
            replace(each, memory=memory, sharing=SharingLaw(1e-3, memory=memory))
            for each in cluster.devices
        )
        state = replace(cluster, devices=devices)
        assert planned(replace(request, clusters=(state,))).segments == SHARED.segments
        away = replace(state, devices=(devices[0], replace(devices[1], max_blocks=0), *devices[2:]))
        plan = planned(replace(request, clusters=(away,)))
        assert (plan.order_of_sums == SHARED.order_of_sums) == holds


def drawn_devices(rng: np.random.Generator, names: str) -> list[DeviceProfile]:
    """Draw devices with memory for a few blocks; some recompute, have links or owners' limits."""
    recomputes, linked, limited = rng.random(3) < 0.4
    devices = []
    for name in names:
        limit, trained = float(rng.uniform(15, 70)), float(rng.choice([0.0, 0.5]))
        memory = MemoryBudget(limit, 0.0, 10.0, 0.0, 0.0, 8.0, trained)
        u, v, w = rng.uniform(0.05, [2.0, 0.3, 0.5]).tolist()
        others = (each for each in names if each != name and rng.random() < 0.5)
        links = [Link(each, float(rng.uniform(0, 1)), 0.0, 0.01) for each in others if linked]
        most = int(rng.integers(2, 7)) if limited else None
        sharing = SharingLaw(0.01, None, memory)
        box = DeviceProfile(name, AffineLaw(u, v, w, 0.1), most, None, memory, sharing)
        small = replace(box, memory=MemoryBudget(limit, 0.0, 3.0, 0.0, 0.0, 1.0, trained))
        box = box.or_recomputing(4 / 3, small) if recomputes else box
        devices.append(replace(box, links=tuple(links)))
    return devices


def parts_of(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write a count as a sum."""
    yield from [(first, *rest) for first in range(1, count) for rest in parts_of(count - first)]
    yield (count,)


def assignments(segments: Sequence[SegmentPlan], names: set[str]) -> Iterator[list[SegmentPlan]]:
    """Yield all ways to assign the segments' shares to devices."""
    if not segments:
        yield []
        return
    first, *others = segments
    for counts in parts_of(len(first.rows)):
        for own in permutations(sorted(names), len(counts)):
            each = [name for name, count in zip(own, counts, strict=True) for _ in range(count)]
            shares = tuple(map(Share, each, first.rows)) if first.shares else ()
            for rest in assignments(others, names - {*own}):
                yield [SegmentPlan(own[0], first.span, shares), *rest]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "auto"])
def test_shares_are_kept_if_any_devices_can_hold_them(schedule: str) -> None:
    """If the plan has other shares, brute force finds no devices that can hold the kept ones."""
    kept = others = 0
    for seed in range(cases(few=6, many=1000)):
        rng = np.random.default_rng(seed)
        names = "abcd"[: rng.integers(3, 5)]
        devices, m = drawn_devices(rng, names), int(rng.choice([1, 2, 4]))
        law = law_of(names, m=m, apart=True, stages=stages_of({"a": 6}), send_s=0.1)
        times = {name: replace(each, rows=ROWS / m) for name, each in law.devices.items()}
        law = replace(law, devices=times)
        request = replace(request_of(None, law), schedule=schedule)
        cluster = replace(request.clusters[0], devices=tuple(devices))
        try:
            first = planned(replace(request, clusters=(cluster,)))
        except InfeasibleRoundError:
            continue
        absent = rng.choice([*names], len(names) - 2, replace=False)
        there = [replace(each, max_blocks=0) if each.name in absent else each for each in devices]
        step = law if rng.random() < 0.7 else None
        cluster = replace(cluster, devices=tuple(there), step=step)
        request = replace(request, clusters=(cluster,), kept=(first,))
        with suppress(InfeasibleRoundError):
            if planned(request).order_of_sums == first.order_of_sums:
                kept += first.shares
                continue
        others += 1
        for each in schedules(schedule, measured=step is not None):
            problem = cluster_problem(replace(request, schedule=each), cluster, "overlap")
            rows = largest_rows(problem, first.num_micro_batches)
            for segments in assignments(first.segments, {*names} - {*absent}):
                plan = replace(first, segments=tuple(segments))
                stages = stages_of_plan(plan, problem.devices, rows)
                point = decided(problem, stages, first.num_micro_batches)
                assert not is_possible(problem.in_modes(point.recomputing), point), seed
    assert kept > 3 and others


def with_memory(request: RoundRequest, limits: Sequence[float]) -> RoundRequest:
    """Return the request with these bytes of memory. A block takes 2 bytes, and 8 more for all rows
    of a batch. Devices with 0 bytes are absent."""
    (cluster,) = request.clusters
    devices = []
    for device, limit in zip(cluster.devices, limits, strict=True):
        memory = MemoryBudget(limit, 0.0, 10.0, 0.0, 0.0, 8.0)
        own = replace(device, memory=memory, sharing=SharingLaw(1e-3, None, memory))
        devices.append(own if limit else replace(own, max_blocks=0))
    return replace(request, clusters=(replace(cluster, devices=tuple(devices)),))


@pytest.mark.parametrize(
    ("limits", "holders"),
    [
        ((33, 0, 21, 17), ["(3 a, 1 d)", "c"]),
        ((33, 21, 0, 17), ["(3 a, 1 d)", "b"]),
        ((17, 41, 21, 0), ["(3 b, 1 a)", "c"]),
        ((0, 40, 21, 31), ["(3 b, 1 b)", "c"]),
    ],
    ids=["a free device", "two exchanges", "an exchange", "one left out"],
)
@pytest.mark.parametrize("law", [LAW, None])
def test_memory_decides_which_device_takes_over_a_share(
    limits: Sequence[float], holders: list[str], law: StepLaw | None
) -> None:
    """Four blocks take 32 bytes with three rows, 16 with one row, and 40 with all rows."""
    plan = planned(with_memory(request_of(SHARED, law), limits))
    assert [each.holders for each in plan.segments] == holders


def test_a_device_that_cannot_take_over_shares_is_left_out() -> None:
    """Device b can hold two rows of eight, but would also get a's three rows in any order."""
    shares = Share("a", 3), Share("b", 2), Share("c", 3)
    kept = ClusterPlan(0, (SegmentPlan("a", Span(0, BLOCKS), shares),), 1, "gpipe")
    plan = planned(with_memory(request_of(kept), (0, 25, 60, 0)))
    assert [each.holders for each in plan.segments] == ["(3 c, 2 c, 3 c)"]


def test_an_impossible_plan_of_a_damaged_checkpoint_is_not_kept() -> None:
    """The plan has too many or too few blocks, too many micro-batches, or exceeds limits."""
    (cluster,) = (request := with_memory(request_of(None), (33, 17, 21, 40))).clusters
    devices = tuple(each.or_recomputing(4 / 3, each) for each in cluster.devices)
    request = replace(request, clusters=(replace(cluster, devices=devices),))
    first, last = SHARED.segments
    more = replace(SHARED, segments=(first, replace(last, span=Span(4, 3))))
    for kept in (more, replace(SHARED, num_micro_batches=9), replace(SHARED, segments=(first,))):
        assert planned(replace(request, kept=(kept,))).num_micro_batches <= ROWS
    over = replace(SHARED, over_limits=True)
    assert not planned(replace(request, kept=(over,))).over_limits


def test_a_schedule_that_can_hold_the_shares_is_chosen() -> None:
    """With GPipe the shares do not fit, because it keeps the tensors of all micro-batches. A new
    plan with GPipe may be faster."""
    measured = MeasuredPlan(stages_of({"a": 6}), 4, 1.0, "gpipe")
    law = replace(LAW, num_micro_batches=4, measured=(measured,))
    shares = Share("a", 1), Share("b", 1)
    kept = ClusterPlan(0, (SegmentPlan("a", Span(0, 4), shares), SHARED.segments[1]), 4, "gpipe")
    request = with_memory(request_of(kept, law, row_s={"d": 0.01}), (22, 22, 20, 60))
    for schedule, same in (("gpipe", False), ("one_f_one_b", True), ("auto", True)):
        plan = planned(replace(request, schedule=schedule))
        assert (plan.order_of_sums == kept.order_of_sums) == same


@pytest.mark.parametrize("framework", ["asteroid", "vanilla_fl"])
def test_frameworks_that_share_stages_keep_a_plan_without_shares(framework: str) -> None:
    """Without the kept plan the framework would share the stage."""
    kept = ClusterPlan(0, (SegmentPlan("a", Span(0, BLOCKS)),), 1, "gpipe")
    (cluster,) = (request := request_of(kept, None)).clusters
    devices = tuple(replace(each, sharing=SharingLaw(0.0)) for each in cluster.devices)
    cluster = replace(cluster, devices=devices)
    request = replace(request, clusters=(cluster,), partition=framework)
    assert planned(replace(request, kept=())).shares
    assert planned(request).segments == kept.segments


def test_a_shared_plan_that_exceeds_limits_is_kept_for_a_framework() -> None:
    request = replace(with_memory(request_of(None, None), (5, 5, 5, 5)), partition="asteroid")
    plan = planned(request)
    assert plan.shares and plan.over_limits
    assert planned(replace(request, kept=(plan,))).segments == plan.segments


def test_runs_with_links_or_a_segment_limit_survive_a_lost_device() -> None:
    """If the micro-batches cannot be kept after a device is lost, others are chosen."""
    law = AffineLaw(0.5, 1.0, 0.1, 0.0)
    (cluster,) = (request := request_of(None, None)).clusters
    devices = []
    for name in "abcd":
        links = tuple(Link(other, 0.2, 0.0) for other in "abcd" if other != name)
        own = 0.0 if name == "d" else 30.0
        devices.append(DeviceProfile(name, law, memory=MemoryBudget(own, 0, 6, 2), links=links))
    for used, bound in ((devices, None), ([replace(d, links=()) for d in devices], 2)):
        state = replace(cluster, devices=tuple(used))
        first = planned(replace(request, clusters=(state,), num_segments=bound), "exact")
        for lost in "abc":
            left = (replace(d, max_blocks=0) if d.name == lost else d for d in used)
            state = replace(cluster, devices=tuple(left))
            later = replace(request, clusters=(state,), num_segments=bound, kept=(first,))
            assert lost not in planned(later, "exact").devices


def test_micro_batches_that_need_too_many_segments_are_not_kept() -> None:
    """Without device a, four micro-batches need three segments, and eight need two."""
    (cluster,) = (request := request_of(None, None)).clusters
    memory = (MemoryBudget(limit, 0.0, 6.0, 2.0) for limit in (40.0, 24.0, 24.0, 24.0))
    law = AffineLaw(0.5, 5.0, 0.0, 0.0)
    devices = [DeviceProfile(n, law, memory=own) for n, own in zip(NAMES, memory, strict=True)]
    cluster = replace(cluster, devices=tuple(devices))
    first = planned(replace(request, clusters=(cluster,), num_segments=2), "exact")
    assert first.num_micro_batches == 4
    cluster = replace(cluster, devices=(replace(devices[0], max_blocks=0), *devices[1:]))
    for bound, m in ((2, 8), (3, 4)):
        later = replace(request, clusters=(cluster,), num_segments=bound, kept=(first,))
        assert planned(later, "exact").num_micro_batches == m
