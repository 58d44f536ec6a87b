"""Plans of later rounds of real devices: the micro-batches and shares of the first one."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from step_laws import law_of, stages_of

from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, MemoryBudget, SharingLaw
from collapipe.step_law import HeldStage, MeasuredPlan, StepLaw
from optim.baselines import AllUnits
from optim.cost import round_cost
from optim.planner import RoundRequest
from optim.verify import verify_plan

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
    """A round after one with the plan ``kept``. Devices hold at most ``limits`` blocks, and take
    ``row_s`` for a row of a block; the default is half a second."""
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
    sizes = BLOCKS, ROWS, 1, None, ROWS, "gpipe", (), (0.0,), (None,)
    return RoundRequest(2, (cluster,), *sizes, kept=(kept,) if kept else ())


def planned(request: RoundRequest, partition: str = "shared") -> ClusterPlan:
    """The verified plan."""
    plan = AllUnits(partition=partition).plan_round(request, np.random.default_rng(0))
    verify_plan(plan, request)
    (cost,) = round_cost(plan, request, "overlap", "none", "streamed").clusters
    (cluster,) = plan.clusters
    assert cost.pipeline_s == pytest.approx(cluster.latency_s)
    return cluster


@pytest.mark.parametrize("kept", [ALONE, SHARED])
@pytest.mark.parametrize("seed", range(30))
def test_bits_follow_neither_the_clock_nor_a_loss(kept: ClusterPlan, seed: int) -> None:
    """Whatever was measured and whichever two devices are away: the same micro-batches, and the
    same shares of the same blocks."""
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


def test_a_lost_device_has_its_share_again_once_it_is_back() -> None:
    gone = planned(request_of(SHARED, limits={"b": 0}))
    assert [each.holders for each in gone.segments] == ["(3 a, 1 a)", "c"]
    assert planned(request_of(SHARED)).segments == SHARED.segments


def test_a_stage_without_devices_goes_to_the_fastest_that_is_free() -> None:
    plan = planned(request_of(SHARED, limits={"a": 0, "b": 0}, row_s={"d": 0.25}))
    assert [each.holders for each in plan.segments] == ["(3 d, 1 d)", "c"]


def test_two_devices_are_exchanged_if_that_is_faster_by_more_than_the_interval() -> None:
    """Without measured times none are: those of the inventory do not change."""
    slow = {"a": 5.0}
    assert planned(request_of(SHARED, None, row_s=slow)).segments == SHARED.segments
    plan = planned(request_of(SHARED, row_s=slow))
    assert "a" not in plan.segments[0].devices[:1] and plan.order_of_sums == SHARED.order_of_sums
    for doubt, exchanged in ((0.01, True), (0.9, False)):
        law = replace(LAW, spread=doubt, spread_of_new=doubt)
        plan = planned(request_of(SHARED, law, row_s={"a": 0.7}))
        assert (plan.segments != SHARED.segments) == exchanged


def test_the_first_round_shares_stages_by_measured_times() -> None:
    assert planned(request_of(None)).shares
    assert not planned(request_of(None, None)).shares


def test_a_run_of_single_devices_goes_on_with_them() -> None:
    """Though an earlier run's shared stage was measured to be fast."""
    measured = MeasuredPlan((HeldStage(("a", "b"), 6, (2, 2)),), 2, 1e-3, "gpipe")
    law = replace(LAW, stages=measured.stages, measured=(measured,))
    for partition in ("shared", "exact"):
        assert not planned(request_of(ALONE, law), partition).shares
    assert planned(request_of(None, law)).shares


def test_all_is_free_if_nothing_can_hold_what_was_kept() -> None:
    small = dict.fromkeys(NAMES, 2)
    plan = planned(request_of(SHARED, limits=small))
    assert sum(each.span.blocks for each in plan.segments) == BLOCKS
    assert plan.order_of_sums != SHARED.order_of_sums


@pytest.mark.parametrize("over_limits", [False, True])
def test_vanilla_fl_keeps_its_rows_whatever_its_devices_are(over_limits: bool) -> None:
    """Without a law of sharing, or with less memory than a replica needs."""
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


def test_several_shares_of_a_device_need_gradients_of_each() -> None:
    """Four blocks take 40 bytes. With a share of three rows of four, 15 more for gradients of the
    other one; with both shares 16 for the second one's."""
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
