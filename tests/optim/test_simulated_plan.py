"""Plans of clusters with measured steps."""

from dataclasses import replace

import numpy as np
import pytest
from made_request import request_for
from step_laws import law_of, stages_of, works_with

from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.state import (
    AffineLaw,
    Channel,
    ClusterState,
    DeviceProfile,
    MemoryBudget,
    Payload,
    SharingLaw,
    Uplink,
)
from collapipe.step_law import HeldStage, LaunchTimes, MeasuredPlan, StepLaw
from optim.baselines import AllUnits, EvenSplit, RandomUnits
from optim.cluster.problem import cluster_problem
from optim.cost import round_cost
from optim.dssra import Dssra
from optim.partition.exact import exact_partition
from optim.planner import RoundRequest
from optim.problem import ClusterProblem, Partition
from optim.simulated_plan import law_for, simulated_front, with_micro_batches
from optim.step import step_s
from optim.verified import solve_verified
from optim.verify import verify_plan

NAMES = "abc"
SLOW_CONTROL_UNIT = {"embedding_forward_s": 2.0, "overhead_s": 5.0}


def request_of(law: StepLaw | None, block_s: float = 1.0, most: int | None = None) -> RoundRequest:
    """Return a request: six blocks, batches of eight in at most eight micro-batches, two steps."""
    time = AffineLaw(block_s / 2, 0.0, 0.0, 0.0)  # ``block_s`` is for two samples
    devices = tuple(DeviceProfile(name, time, max_blocks=most) for name in NAMES)
    cluster = ClusterState(0, devices, 100, real_devices=True, step=law)
    return request_for([cluster], 6, 8, 8, local_steps=2)


def later(request: RoundRequest, m: int = 4) -> RoundRequest:
    """Return the request of a later round, which keeps ``m`` micro-batches."""
    first = ClusterPlan(0, (SegmentPlan("a", Span(0, 6)),), m, "one_f_one_b")
    return replace(request, kept=(first,))


def held(request: RoundRequest) -> dict[str, int]:
    """Return the planned blocks of each device."""
    plan = AllUnits().plan_round(request, np.random.default_rng(0)).clusters[0]
    return {each.device: each.span.blocks for each in plan.segments}


def micro_batches(request: RoundRequest) -> int:
    """Return the planned number of micro-batches, without shared stages."""
    plan = AllUnits().plan_round(request, np.random.default_rng(0))
    return plan.clusters[0].num_micro_batches


def test_a_run_keeps_the_number_of_micro_batches_of_its_first_round() -> None:
    """Another number would change the weights' last bits, so that a temporary load would change a
    model."""
    assert micro_batches(request_of(None)) == 8
    for block_s in (0.01, 1.0, 100.0):
        law = law_of(NAMES, m=2, apart=True, blocks={"a": 6})
        assert micro_batches(later(request_of(law, block_s))) == 4
        assert micro_batches(request_of(law, block_s)) == 8


def test_m_is_chosen_freely_if_memory_forbids_the_measured_one() -> None:
    request = later(request_of(law_of(NAMES, apart=True), most=3), m=1)
    problem = cluster_problem(request, request.clusters[0], "overlap")
    assert (problem.min_micro_batches, problem.max_micro_batches) == (1, 1)
    request = later(request_of(law_of(NAMES, apart=True), most=1), m=1)
    problem = cluster_problem(request, request.clusters[0], "overlap")
    assert (problem.min_micro_batches, problem.max_micro_batches) == (1, 8)


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_a_plan_stays_unless_another_is_faster_by_more_than_the_interval(spread: float) -> None:
    law = law_of(NAMES, apart=True, blocks={"a": 3, "b": 2, "c": 1}, spread=spread)
    assert held(later(request_of(law))) == (
        law.blocks if spread > 0.1 else {"a": 2, "b": 2, "c": 2}
    )


def test_a_plan_that_became_impossible_is_replaced() -> None:
    law = law_of(NAMES, apart=True, blocks={"a": 3, "b": 2, "c": 1}, spread=2.0, head_s=30.0)
    assert held(later(request_of(law))) == law.blocks
    sold = replace(law, stages=stages_of({"sold": 6}))
    for request in (request_of(law, most=2), request_of(sold)):
        assert held(later(request)) == {"a": 2, "b": 2, "c": 2}


def test_one_machine_gets_as_many_segments_as_it_has_cores() -> None:
    """By the closed law three segments would always be best."""
    one, three = (law_of(NAMES, cores=cores, send_s=0.1, spread=0.0) for cores in (1, 3))
    assert held(request_of(one)) == {"a": 6}
    assert held(request_of(three)) == {"a": 2, "b": 2, "c": 2}


def test_the_planned_time_is_the_simulated_one() -> None:
    law = law_of(NAMES, apart=True, head_s=3.0, head_pace_s=2.0, **SLOW_CONTROL_UNIT)
    request = request_of(
        replace(law, stages=stages_of({"a": 2, "b": 2, "c": 2}), factor=1.25, spread=0.1)
    )
    plan = AllUnits().plan_round(request, np.random.default_rng(0))
    (cost,) = round_cost(plan, request, "overlap", "none", "streamed").clusters
    works = works_with(law, NAMES, [1.0] * 3, [2, 2, 2])
    expected_s = 2 * 1.25 * step_s(law, works, "one_f_one_b")
    assert cost.pipeline_s == pytest.approx(expected_s)
    assert plan.clusters[0].latency_s == pytest.approx(expected_s)
    assert cost.spread == 0.1


def test_the_front_ascends_in_segments_and_descends_in_time() -> None:
    law = law_of(NAMES, apart=True, blocks={"a": 6})
    request = request_of(law)
    problem = cluster_problem(request, request.clusters[0], "overlap")
    front = [Partition(each, 4, 99.0) for each in ((6, 0, 0), (1, 5, 0), (0, 2, 4), (4, 1, 1))]
    found = simulated_front(front, problem, law, "one_f_one_b")
    assert [each.num_segments for each in found] == [1, 2, 3]
    times = [each.latency_s for each in found]
    assert times == sorted(times, reverse=True)
    assert found[1].blocks == (0, 3, 3) and found[2].blocks == (
        3,
        2,
        1,
    )  # neighbouring splits are faster


def test_a_returning_device_is_used_despite_rough_predictions() -> None:
    law = law_of(NAMES, apart=True, blocks={"a": 3, "b": 3}, spread=1.0)
    assert held(request_of(law)) == {"a": 2, "b": 2, "c": 2}  # faster by more than 18 %
    law = law_of(NAMES, apart=True, blocks={"a": 2, "b": 3, "c": 1}, spread=1.0, head_s=30.0)
    assert held(later(request_of(law))) == law.blocks
    assert held(later(request_of(replace(law, present=("a", "b"))))) == {"a": 2, "b": 2, "c": 2}


def test_the_last_plan_is_compared_after_an_idle_device_is_lost() -> None:
    """The closed law finds the two other devices equally fast; the measured law does not."""
    law = law_of(NAMES, apart=True, blocks={"b": 6}, spread=0.0)
    slow = replace(law.devices["a"], send_s=9.0)
    law = replace(law, devices={**law.devices, "a": slow})
    devices = tuple(DeviceProfile(name, AffineLaw(1.0, 0.0, 0.0, 0.0)) for name in "ab")
    problem = ClusterProblem(devices, 6, 8, 4, "overlap", min_micro_batches=4)
    (point,) = simulated_front([Partition((6, 0), 4, 48.0)], problem, law, "one_f_one_b", 1)
    assert point.blocks == (0, 6)


def test_a_prescribed_split_is_not_replaced() -> None:
    """The last device is slow, so another split would be faster."""
    law = law_of(NAMES, apart=True, blocks={"a": 3, "b": 3}, spread=0.02)
    request = replace(request_of(law), num_micro_batches=4)
    (cluster,) = request.clusters
    slow = replace(cluster.devices[2], time=AffineLaw(5.0, 0.0, 0.0, 0.0))
    request = replace(request, clusters=(replace(cluster, devices=(*cluster.devices[:2], slow)),))
    assert held(request) == {"a": 3, "b": 3}
    for rule in ("pipeline", "gpipe"):
        assert held(replace(request, partition=rule)) == {"a": 2, "b": 2, "c": 2}
    of_eight = replace(request, partition="pipeline", num_micro_batches=8)
    assert micro_batches(of_eight) == 8  # the rule's number, not the measured one
    assert micro_batches(later(of_eight)) == 4


def test_measured_steps_are_ignored_if_the_head_has_two_places() -> None:
    request = request_of(law_of(NAMES, apart=True))
    (cluster,) = request.clusters
    payloads = tuple(
        Payload("float32", "float32", 1.0, 0.0, 0.0, head) for head in ("server", "control_unit")
    )
    assert law_for(cluster) == cluster.step
    uplink = Uplink(1.0, 1.0, 1.0, 0.0, (), payloads=payloads)
    assert law_for(replace(cluster, uplink=uplink)) is None
    assert law_for(replace(cluster, real_devices=False)) is None


def planned(request: RoundRequest, sync_s: float) -> ClusterPlan:
    """Return the verified plan with ``sharing=auto``."""
    (cluster,) = request.clusters
    devices = tuple(replace(each, sharing=SharingLaw(sync_s)) for each in cluster.devices)
    uplink = Uplink(1.0, 100.0, 1.0, 0.0, (1.0,))
    cluster = replace(cluster, devices=devices, uplink=uplink)
    request = replace(request, clusters=(cluster,), channels=(Channel(1e6, 1e-9, 1e-9),))
    strategy = Dssra(sharing="auto", latency="overlap")
    plan = strategy.plan_round(request, np.random.default_rng(0))
    verify_plan(plan, request)
    (cost,) = round_cost(plan, request, "overlap", "none", "streamed").clusters
    assert cost.pipeline_s == pytest.approx(plan.clusters[0].latency_s)
    return plan.clusters[0]


def auto(request: RoundRequest, sync_s: float = 1e-3) -> list[dict[str, int]]:
    """Return the rows of each stage's devices with ``sharing=auto``; 0 for a single device."""
    return [
        dict(zip(each.devices, each.rows_of_devices or (0,), strict=True))
        for each in planned(request, sync_s).segments
    ]


def test_real_devices_share_stages_only_with_measured_times() -> None:
    """Simulated devices share by their law. Real devices also share if the model does not fit
    otherwise."""
    request = request_of(None)
    simulated = replace(request, clusters=(replace(request.clusters[0], real_devices=False),))
    assert [len(stage) for stage in auto(simulated)] == [3]
    assert all(len(stage) == 1 for stage in auto(request))
    assert max(len(stage) for stage in auto(request_of(None, most=1))) > 1


def test_stages_are_shared_if_that_is_faster_by_the_measured_law() -> None:
    """Stages are shared if hops take longer than adding gradients, and not otherwise."""
    law = law_of(NAMES, m=2, apart=True, send_s=2.0, stages=stages_of({"a": 2, "b": 2, "c": 2}))
    assert auto(request_of(law)) == [{"a": 2, "b": 2}]
    assert all(len(stage) == 1 for stage in auto(request_of(law), sync_s=10.0))


def test_a_shared_stage_stays_unless_a_pipeline_is_faster_by_more_than_a_deviation() -> None:
    rows = HeldStage(("a", "b", "c"), 6, (2, 3, 3))
    for sync_s, doubt, stays in ((0.01, 0.2, True), (0.33, 0.2, True), (0.33, 0.1, False)):
        law = law_of(NAMES, m=1, apart=True, stages=(rows,), spread=0.9, spread_of_new=doubt)
        found = auto(request_of(law), sync_s)
        assert (found == [{"a": 2, "b": 3, "c": 3}]) == stays
        assert stays or all(len(stage) == 1 for stage in found)


def test_shared_stages_may_change_the_number_of_micro_batches() -> None:
    """With two micro-batches, three devices cannot share four rows evenly. A head that is as slow
    as the devices is a reason for several micro-batches."""
    rows = HeldStage(("a", "b", "c"), 6, (1, 2, 1))
    law = law_of(NAMES, m=2, apart=True, stages=(rows,), spread=0.1)
    assert auto(request_of(law), 0.01) == [{"a": 3, "b": 3, "c": 2}]
    slow_head = replace(law, head_s=6.0, head_pace_s=6.0)
    assert sum(auto(request_of(slow_head), 0.01)[0].values()) < 8


def test_an_earlier_plan_is_chosen_again_if_it_was_measured_faster() -> None:
    """The law predicts that the shared stage is the fastest. Plans with nearly equal times do not
    alternate, and a measurement with little weight does not decide."""
    rows, alone = HeldStage(("a", "b", "c"), 6, (2, 3, 3)), stages_of({"a": 2, "b": 2, "c": 2})
    last = MeasuredPlan((rows,), 1, 20.0, "one_f_one_b")
    law = law_of(NAMES, m=1, apart=True, stages=(rows,), measured=(last,))
    assert len(auto(request_of(law), 0.01)) == 1
    last_s = planned(request_of(law), 0.01).latency_s / request_of(law).local_steps
    for m in (1, 3):
        for part, weight, again in ((0.85, 1.0, True), (0.93, 1.0, False), (0.85, 0.1, False)):
            earlier = MeasuredPlan(alone, m, part * last_s, "one_f_one_b", weight)
            found = auto(request_of(replace(law, measured=(last, earlier))), 0.01)
            assert (found == [{"a": 0}, {"b": 0}, {"c": 0}]) == again
    impossible = MeasuredPlan(stages_of({"a": 6, "sold": 1}), 1, 1e-3, "gpipe")
    assert len(auto(request_of(replace(law, measured=(last, impossible))), 0.01)) == 1


def test_the_faster_schedule_is_chosen_by_measured_times() -> None:
    """A slow head that works on several micro-batches needs more of them in flight than 1F1B has. A
    schedule stays unless another one is faster by more than the interval."""

    def chosen(law: StepLaw | None, most: int | None = None) -> str:
        request = replace(request_of(law, most=most), schedule="auto")
        plan = AllUnits().plan_round(request, np.random.default_rng(0))
        verify_plan(plan, request)
        return plan.clusters[0].schedule

    law = law_of(NAMES, m=8, apart=True, head_s=30.0, head_pace_s=1.0)
    assert chosen(None) == chosen(replace(law, head_s=1.0)) == "one_f_one_b"
    assert chosen(law) == "gpipe"
    stages = stages_of({"a": 2, "b": 2, "c": 2})
    for schedule in ("gpipe", "one_f_one_b"):
        measured = MeasuredPlan(stages, 8, 1.0, schedule)
        last = replace(law, stages=stages, measured=(measured,), head_s=1.0)
        assert chosen(last) == schedule
    request = replace(request_of(law), schedule="auto")
    for strategy in (EvenSplit(), RandomUnits(1)):
        (cluster,) = strategy.plan_round(request, np.random.default_rng(0)).clusters
        assert cluster.schedule in ("gpipe", "one_f_one_b")


def test_a_schedule_within_limits_is_preferred() -> None:
    """Rules that ignore limits exceed them with both schedules, or only with GPipe."""
    law = law_of(NAMES, m=8, apart=True, head_s=30.0, head_pace_s=1.0)
    request = replace(request_of(law), schedule="auto", partition="pipeline")
    (cluster,) = request.clusters
    for room, schedule, over in ((9.0, "one_f_one_b", False), (1.0, "gpipe", True)):
        memory = MemoryBudget(room, 0.0, 0.5 + 8.0, 0.0, 0.0, 8.0)
        small = tuple(replace(each, memory=memory) for each in cluster.devices)
        own = replace(request, clusters=(replace(cluster, devices=small),))
        (found,) = AllUnits().plan_round(own, np.random.default_rng(0)).clusters
        assert (found.schedule, found.over_limits) == (schedule, over)


def test_memory_may_forbid_a_schedule() -> None:
    """GPipe would be faster, but it keeps the tensors of all micro-batches."""
    law = law_of(NAMES, m=8, apart=True, head_s=30.0, head_pace_s=1.0)
    request = replace(request_of(law), schedule="auto")
    (cluster,) = request.clusters
    memory = MemoryBudget(2 * 4.5, 0.0, 0.5 + 8.0, 0.0, 0.0, 8.0)  # for half of the rows
    small = tuple(replace(each, memory=memory) for each in cluster.devices)
    request = replace(request, clusters=(replace(cluster, devices=small),))
    (cluster,) = AllUnits().plan_round(request, np.random.default_rng(0)).clusters
    assert cluster.schedule == "one_f_one_b"


@pytest.mark.parametrize("doubt", [0.02, 0.5])
def test_new_shared_stages_must_gain_more_than_past_prediction_errors(
    doubt: float,
) -> None:
    law = law_of(NAMES, m=2, apart=True, send_s=2.0, spread_of_new=doubt)
    law = replace(law, stages=stages_of({"a": 2, "b": 2, "c": 2}))
    assert (max(map(len, auto(request_of(law)))) > 1) == (doubt < 0.1)


@pytest.mark.parametrize("rows", [0.0, 1 / 4096, 2.0**31 - 1])
@pytest.mark.parametrize("send_s", [0.0, 1e-15, 1e4])
@pytest.mark.parametrize("hop", [(0.0, 0.0), (1e-18, 0.0), (1e6, 1e6)])
def test_no_reported_law_makes_planning_fail(
    rows: float, send_s: float, hop: tuple[float, float]
) -> None:
    """A unit may report any valid law."""
    law = law_of(NAMES, m=4096, apart=True, send_s=send_s, head_s=1e4, head_pace_s=1e-15)
    devices = {name: replace(each, rows=rows) for name, each in law.devices.items()}
    request = request_of(replace(law, devices=devices))
    (cluster,) = request.clusters
    w, ell = hop
    slow = tuple(replace(each, time=replace(each.time, w=w, ell=ell)) for each in cluster.devices)
    assert auto(replace(request, clusters=(replace(cluster, devices=slow),)))


def test_plans_that_are_too_long_to_simulate_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their times come from the closed law, which does not include the head."""
    law = law_of(NAMES, m=1, apart=True, stages=stages_of({"a": 6}), head_s=20.0)
    assert planned(request_of(law), 3.0).num_micro_batches > 2
    for most, expected in ((3, 2), (1, 1)):  # actions of a step
        monkeypatch.setattr("optim.simulated_plan._MOST_ACTIONS", most)
        assert planned(request_of(law), 3.0).num_micro_batches == expected


@pytest.mark.parametrize(("launch_s", "expected"), [(0.0, 8), (2.0, 1)])
def test_a_head_that_takes_time_for_each_micro_batch_makes_them_fewer(
    launch_s: float, expected: int
) -> None:
    """Else the head's time follows the size of micro-batches, and more of them overlap more."""
    law = law_of(NAMES, m=8, apart=True, blocks={"a": 6}, head_s=2.0, head_pace_s=2.0)
    law = replace(law, launch=LaunchTimes(head_s=launch_s, head_pace_s=launch_s))
    request = request_of(law, block_s=0.1)
    assert planned(request, 3.0).num_micro_batches == micro_batches(request) == expected


def test_an_order_that_memory_requires_is_kept() -> None:
    """The number of micro-batches stays as well, and so does an equally fast plan."""
    memory = MemoryBudget(12.0, 0.0, 9.0, 0.0, 0.0, 8.0)
    devices = tuple(
        DeviceProfile(name, AffineLaw(1.0, 0.0, 0.0, 0.0), memory=own)
        for name, own in (("a", memory), ("b", replace(memory, limit_bytes=8.0)))
    )
    problem = ClusterProblem(devices, 6, 8, 8, "overlap", in_flight=(2, 3))
    law = law_of("ab", m=8, apart=True, blocks={"b": 2, "a": 4}, spread=2.0)
    fixed = with_micro_batches(problem, 8, law.stages)
    assert (fixed.min_micro_batches, fixed.max_micro_batches) == (8, 8)
    assert with_micro_batches(problem, 8, stages_of({"sold": 6})).min_micro_batches == 8
    solution = solve_verified(fixed, exact_partition, np.random.default_rng(0))
    assert [each.devices for each in solution.best.stages] == [(1,), (0,)]
    (point,) = simulated_front([solution.best], fixed, law, "one_f_one_b")
    assert (point.blocks, point.stages) == ((4, 2), solution.best.stages)
    reordered = replace(solution.best, blocks=(5, 1), stages=())  # does not fit in this order
    (point,) = simulated_front([reordered], fixed, law, "one_f_one_b")
    assert point.blocks == (4, 2)
