"""Clusters are split by the strategy's or the framework's solver, over the present devices."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made_request import request_for

from collapipe.errors import InfeasibleRoundError, PlanViolationError, UnfinishedSearchError
from collapipe.plan import Certificate, ClusterPlan, RoundPlan
from collapipe.state import (
    AffineLaw,
    Channel,
    ClusterState,
    DeviceProfile,
    EnergyBudget,
    MemoryBudget,
    SharingLaw,
    Uplink,
)
from optim.allocation.exact import exact_allocation
from optim.baselines import AllUnits, EvenSplit, HighestLoss, RandomUnits, ShortestDelay
from optim.cluster.cache import Front
from optim.cluster.front import _of_fewer_segments
from optim.cluster.fronts import fronts, known_plans
from optim.cluster.problem import activation_times, cluster_problem
from optim.dssra import Dssra
from optim.joint_round import _with_bounds, solve_round
from optim.latency import batch_s, partition_of
from optim.partition.exact import exact_partition
from optim.planner import Planner, RoundRequest, present_devices
from optim.problem import ClusterProblem, ClusterSolution, Latency, Partition, UplinkTimes
from optim.round.problem import RoundOptions
from optim.sharing.exact import shared_partition
from optim.verify import verify_plan
from tests.optim import rounds
from tests.optim.drawn_requests import away, drawn_request
from tests.thorough import cases

STRATEGIES: dict[str, Planner] = {
    "dssra": Dssra(),
    "dssra_paper": Dssra(solver="paper"),
    "even": EvenSplit(),
    "all": AllUnits(),
    "random": RandomUnits(3),
    "loss_only": HighestLoss(3),
    "delay_only": ShortestDelay(3),
}
FRAMEWORKS = (None, "no_segment_scheduling", "titanic", "pipeline", "vanilla_fl")
LAW = AffineLaw(0.01, 0.001, 0.001, 0.001)


def request_of(*devices: DeviceProfile, partition: str | None = None) -> RoundRequest:
    """Return a request of one cluster with one channel and 12 blocks."""
    state = ClusterState(7, devices, 10, Uplink(0.5, 10.0, 1e6, 2e6, (1.0,)))
    fields = {"channels": (Channel(5e5, 0.07, 4e-21),), "queues": (3.0,), "partition": partition}
    return request_for([state], 12, 16, 16, "gpipe", local_steps=2, **fields)


def plan(request: RoundRequest, strategy: str = "dssra", seed: int = 0) -> RoundPlan:
    planned = STRATEGIES[strategy].plan_round(request, np.random.default_rng(seed))
    verify_plan(planned, request)
    return planned


def held(cluster: ClusterPlan) -> dict[str, int]:
    return {segment.device: segment.span.blocks for segment in cluster.segments}


def devices(*limits: int | None) -> tuple[DeviceProfile, ...]:
    """Return devices with these block limits; each is half as fast as the previous one."""
    return tuple(
        DeviceProfile(f"device-{k}", replace(LAW, u=LAW.u * 2**k), limit)
        for k, limit in enumerate(limits)
    )


@pytest.mark.parametrize("partition", FRAMEWORKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_absent_devices_hold_no_blocks(strategy: str, partition: str | None) -> None:
    """This holds even for frameworks that ignore limits. All devices of unit 60 are absent."""
    for seed, preset in enumerate(("paper", "edge", "paper")[: cases(2, 3)]):
        request = replace(drawn_request(preset, seed), partition=partition)
        there = {
            state.unit: {device.name for device in state.devices if device.max_blocks != 0}
            for state in request.clusters
        }
        planned = plan(request, strategy)
        assert planned.clusters
        for cluster in planned.clusters:
            assert cluster.unit != 60
            assert set(held(cluster)) <= there[cluster.unit]
            assert (not cluster.segments) == (partition == "vanilla_fl")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_absent_device_does_not_change_the_plan(strategy: str) -> None:
    """The plan is the same as if the cluster did not have the device."""
    present = devices(6, 6, 6)
    absent = away(DeviceProfile("absent", AffineLaw(1e-4, 0.0, 0.0, 0.0)))
    for partition in FRAMEWORKS:
        without = plan(request_of(*present, partition=partition), strategy)
        for place in range(4):
            mixed = (*present[:place], absent, *present[place:])
            with_it = plan(request_of(*mixed, partition=partition), strategy)
            assert with_it.clusters == without.clusters
            assert with_it.queues == without.queues


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frameworks_split_replaces_the_strategys(strategy: str) -> None:
    """``pipeline`` gives each device 4 blocks; ``titanic`` gives 4/7, 2/7 and 1/7 of 12. Both use m
    = 8."""
    for partition, blocks in (("pipeline", (4, 4, 4)), ("titanic", (7, 3, 2))):
        (cluster,) = plan(request_of(*devices(8, 8, 8), partition=partition), strategy).clusters
        assert held(cluster) == {f"device-{k}": count for k, count in enumerate(blocks)}
        assert cluster.num_micro_batches == 8
        assert not cluster.over_limits


def test_a_frameworks_solver_overrides_the_strategys_solver() -> None:
    own = RandomUnits(1, partition="pipeline")
    for partition, first in ((None, 4), ("titanic", 7)):
        request = request_of(*devices(8, 8, 8), partition=partition)
        (cluster,) = own.plan_round(request, np.random.default_rng(0)).clusters
        assert held(cluster)["device-0"] == first


def test_replicas_on_present_devices_share_the_batch() -> None:
    """The round takes two steps of the slower device: 12 blocks and 8 samples each."""
    request = request_of(*devices(12, 12), away(devices(1, 1, 1)[2]), partition="vanilla_fl")
    (cluster,) = plan(request).clusters
    assert (cluster.segments, cluster.num_micro_batches) == ((), 1)
    assert cluster.latency_s == pytest.approx(2 * 12 * (0.02 * 8 + 0.001))
    assert not cluster.over_limits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("partition", FRAMEWORKS[1:])
def test_plans_report_limits_that_a_framework_ignored(strategy: str, partition: str) -> None:
    """The split is the same as without limits. The strategy's own solver raises an error
    instead."""
    request = request_of(*devices(3, 3, 3), partition=partition)
    (cluster,) = plan(request, strategy).clusters
    assert cluster.over_limits
    roomy = plan(request_of(*devices(None, None, None), partition=partition), strategy)
    assert (cluster.segments, cluster.latency_s) == (
        roomy.clusters[0].segments,
        roomy.clusters[0].latency_s,
    )
    with pytest.raises(InfeasibleRoundError, match="at most"):
        plan(replace(request, partition=None), strategy)


def test_plans_report_an_exceeded_energy_budget() -> None:
    poor = replace(devices(None)[0], energy=EnergyBudget(1e-6, LAW))
    (cluster,) = plan(request_of(poor, partition="vanilla_fl")).clusters
    assert cluster.over_limits


@pytest.mark.parametrize(("room", "over"), [(0.5, True), (1.5, False)])
def test_replicas_on_real_devices_need_memory_for_gradients(room: float, over: bool) -> None:
    """Each of three devices sums the gradients of up to 14/3 blocks, which two others send."""
    memory = MemoryBudget(12 * 20.0 + room * 2 * 14 / 3 * 5.0, 0.0, 20.0, 0.0, trained_bytes=5.0)
    three = tuple(replace(each, memory=memory) for each in devices(None, None, None))
    request = request_of(*three, partition="vanilla_fl")
    assert not plan(request).clusters[0].over_limits  # simulated devices sum no gradients
    real = replace(request, clusters=(replace(request.clusters[0], real_devices=True),))
    (cluster,) = plan(real).clusters
    assert cluster.over_limits == over
    assert [len(each.devices) for each in cluster.segments] == [3]


def test_replicas_may_exceed_an_owners_limit_of_shared_blocks() -> None:
    """The plan reports the exceeded limit, like every split of a framework."""
    limits = SharingLaw(0.1, max_blocks=11), SharingLaw(0.1, max_blocks=12), None
    for law, over in zip(limits, (True, False, False), strict=True):
        three = tuple(replace(each, sharing=law) for each in devices(None, None, None))
        request = request_of(*three, partition="vanilla_fl")
        real = replace(request, clusters=(replace(request.clusters[0], real_devices=True),))
        assert plan(real).clusters[0].over_limits == over


def test_memory_counts_the_tensors_that_the_schedule_keeps() -> None:
    """A block keeps one byte per sample: GPipe keeps all 16 samples, 1F1B three."""
    memory = MemoryBudget(40.0, 0.0, 1.0 + 16.0, 0.0, 0.0, 16.0)
    two = tuple(replace(each, memory=memory) for each in devices(None, None))
    request = request_of(*two)
    with pytest.raises(InfeasibleRoundError, match="hold at most 4 of 12 blocks"):
        plan(request)
    planned = plan(replace(request, schedule="one_f_one_b"))
    (cluster,) = planned.clusters
    assert sum(held(cluster).values()) == 12
    with pytest.raises(PlanViolationError, match="schedule: one_f_one_b, must be gpipe"):
        verify_plan(planned, request)
    other = replace(planned, clusters=(replace(cluster, schedule="gpipe"),))
    with pytest.raises(PlanViolationError, match="C7"):
        verify_plan(other, request)


def test_limits_do_not_bias_random_splits() -> None:
    """All three devices are drawn equally often, although the second lacks memory for one block."""
    equal = tuple(replace(device, time=LAW) for device in devices(12, 11, 12))
    request = request_of(*equal, partition="no_segment_scheduling")
    request = replace(request, num_micro_batches=1)  # a second segment would not make it faster
    rng, seen = np.random.default_rng(0), Counter[str]()
    for _ in range(300):
        (cluster,) = Dssra().plan_round(request, rng).clusters
        (device,) = held(cluster)
        seen[device] += 1
        assert cluster.over_limits == (device == "device-1")
    # χ² with 2 degrees of freedom exceeds 13.8 for one seed in a thousand; this seed is fixed.
    assert sum((seen[device.name] - 100) ** 2 / 100 for device in equal) < 13.8


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_uplink_times_are_those_at_full_power_on_each_channel(drift: str, fading: str) -> None:
    """0 is always one of the times. Drift ``paper`` lets units lower their power, so any time is
    possible."""
    rng, seen = np.random.default_rng(0), Counter[int]()
    for _ in range(20):
        problem = rounds.random_round(rng, drift, fading)
        found = activation_times(problem.uplinks, problem.channels, problem.options)
        for unit, times in enumerate(found):
            expected = {0.0}
            for channel in range(len(problem.channels)):
                if power := rounds.highest_power(problem, unit, channel):
                    rate = rounds.rate(problem, unit, channel, power)
                    expected.add(problem.uplinks[unit].activation_bits / rate)
            wanted = sorted(expected)
            if problem.options.uplink == "after":
                wanted = [0.0]
            elif drift == "paper" and len(wanted) > 1:
                wanted = [0.0, math.inf]
            assert list(times) == pytest.approx(wanted, rel=1e-9)
            seen[len(times)] += 1
    assert len(seen) > 1


def test_points_of_a_front_cover_all_local_steps() -> None:
    """At the ends of its range, a point is the fastest of those with at most as many segments."""
    seen = 0
    for seed in range(2):
        request = replace(drawn_request("paper", seed), local_steps=3)
        options = RoundOptions(drift="paper")
        times = activation_times([s.uplink for s in request.clusters], request.channels, options)
        found = fronts(request, "overlap", exact_partition, np.random.default_rng(0), options)
        for state, front, uplinks in zip(request.clusters, found, times, strict=True):
            for point in front:
                assert point.fastest_s[0] >= uplinks[0] * (1 - 1e-12)
                rest = [each for each in front if each.num_segments <= point.num_segments]
                for end in filter(math.isfinite, point.fastest_s):
                    least = min(batch_s(each, end) for each in rest)
                    assert batch_s(point, end) == pytest.approx(least, rel=1e-9)
                once = partition_of(
                    cluster_problem(request, state, "overlap"), *held_by(point, state)
                )
                assert point.latency_s == pytest.approx(3 * once.latency_s, rel=1e-12)
                assert point.slowest_s == pytest.approx(3 * once.slowest_s, rel=1e-12)
                seen += len(rest) > 1
    assert seen > 20


def held_by(point: Partition, state: ClusterState) -> tuple[tuple[int, ...], int]:
    """Return δ of the present devices, and m."""
    pairs = zip(point.blocks, state.devices, strict=True)
    there = tuple(blocks for blocks, device in pairs if device.max_blocks != 0)
    return there, point.num_micro_batches


def test_the_error_of_an_infeasible_round_has_its_next_queues() -> None:
    """The queues grow as for idle units. Strategies without queues report no queues."""
    request = request_of(*devices(0, 0))
    idle = 0.08 / 0.07 + 0.1
    reason = "unit 7: each of its 2 devices is away .* federation.on_infeasible=skip waits"
    with pytest.raises(InfeasibleRoundError, match=reason) as caught:
        plan(request)
    assert caught.value.queues == pytest.approx((3.0 + idle - 0.84,))
    for strategy in ("even", "all", "random"):
        with pytest.raises(InfeasibleRoundError, match=reason) as caught:
            plan(request, strategy)
        assert caught.value.queues == ()


def test_the_error_counts_absent_devices_if_the_others_are_too_few() -> None:
    """The error does not mention them if all devices are present."""
    waits = "1 of its 3 devices are away or hold no block: federation.on_infeasible=skip waits"
    with pytest.raises(InfeasibleRoundError, match=waits):
        plan(request_of(*devices(2, 0, 2)))
    with pytest.raises(InfeasibleRoundError) as caught:
        plan(request_of(*devices(2, 2, 2)))
    assert "on_infeasible" not in str(caught.value)


@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_stages_that_are_too_slow_to_share_do_not_change_a_round(preset: str) -> None:
    """Units that are not the slowest have as few segments as without sharing."""
    several = 0
    for seed in range(cases(few=3, many=20)):
        request = with_sharing(drawn_request(preset, seed), SharingLaw(1e6))
        auto, never = (
            Dssra(sharing=each).plan_round(request, np.random.default_rng(0)).clusters
            for each in ("auto", "never")
        )
        assert auto == never
        several += any(len(one.segments) > 1 for one in auto)
    assert several


@pytest.mark.parametrize("uplink", ["streamed", "after"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_a_round_with_unfinished_searches_has_a_lower_bound(drift: str, uplink: str) -> None:
    """Only each unit's slowest plan is known, with the time of its fastest plan as a lower
    bound."""
    strategy, below = Dssra(drift=drift, uplink=uplink, drift_weight=10.0), 0
    for seed in range(cases(few=6, many=100)):
        request, rng = drawn_request(["paper", "edge"][seed % 2], seed), np.random.default_rng(0)
        every = fronts(request, "overlap", exact_partition, rng, strategy)
        slowest = tuple(
            tuple(
                replace(point, bound_s=min(map(latency, front)), fastest_s=UplinkTimes())
                for point in front
                if point is max(front, key=latency)
            )
            for front in every
        )
        best, found = (certificate(request, each, strategy) for each in (every, slowest))
        assert 0 < found.lower_bound <= best.objective * (1 + 1e-9) <= found.objective * (1 + 2e-9)
        below += found.objective > best.objective * (1 + 1e-6) > best.objective >= found.lower_bound
    assert below


def latency(point: Partition) -> float:
    return point.latency_s


def certificate(
    request: RoundRequest, points: Sequence[tuple[Partition, ...]], strategy: Dssra
) -> Certificate:
    return solve_round(request, tuple(points), request.queues, strategy, exact_allocation)[
        1
    ].certificate


def test_the_point_for_unknown_plans_is_as_fast_as_the_fastest() -> None:
    """For any uplink time and sum of stages, no plan is faster, and one is equally fast."""
    rng, most, bound_s = np.random.default_rng(0), 16, 3.0
    known = Partition((6,), 2, 5.0, 2.0, head="server", bound_s=bound_s)
    other = replace(known, head="control_unit", bound_s=4.0)
    *kept, first, second = _with_bounds((known, other), most)
    assert kept == [known, other] and (first.head, second.head) == ("server", "control_unit")
    assert (first.latency_s, second.latency_s, first.num_segments) == (bound_s, 4.0, 1)
    for _ in range(2000):
        m, uplink_s = int(rng.integers(1, most + 1)), float(rng.uniform(0, 10))
        slowest, more = float(rng.uniform(bound_s / m, 4)), float(rng.exponential())
        total = slowest + more * (rng.random() < 0.5)
        plan = Partition((6,), m, total + (m - 1) * slowest, slowest)
        assert batch_s(first, uplink_s) <= batch_s(plan, uplink_s) * (1 + 1e-12)
        equal = Partition((6,), most, bound_s, bound_s / most)  # one stage takes all the time
        assert batch_s(first, uplink_s) == pytest.approx(batch_s(equal, uplink_s))


def test_plans_with_fewer_segments_keep_a_proved_front_proved() -> None:
    """The search for these plans ends at once, but their points have no finite lower bound."""
    equal = tuple(DeviceProfile(f"device-{k}", AffineLaw(0.05, 0.0, 0.0, 0.0)) for k in range(4))
    request, rng = request_of(*equal), np.random.default_rng(0)
    problem = cluster_problem(request, request.clusters[0], "overlap")
    hurried = partial(shared_partition, max_nodes=0)
    assert not exact_partition(problem, max_nodes=0).complete
    fastest = exact_partition(problem).front[-1:]
    few = [*_of_fewer_segments(fastest, problem, hurried, rng)]
    assert few and {point.bound_s for point in few} == {math.inf}
    assert max(point.num_segments for point in few) < fastest[0].num_segments


def test_a_bound_covers_all_local_steps() -> None:
    request, hurried = drawn_request("paper", 1), partial(exact_partition, max_nodes=0)
    rng, known = np.random.default_rng(0), 0
    for state, points in zip(
        request.clusters, fronts(request, "overlap", hurried, rng, Dssra()), strict=True
    ):
        for point in points:
            found = hurried(cluster_problem(request, state, "overlap")).certificate
            assert point.bound_s == pytest.approx(request.local_steps * found.lower_bound)
            known += 1
    assert known and request.local_steps > 1


@pytest.mark.parametrize("latency", ["flow_shop", "bound"])
def test_the_bound_holds_if_fewer_units_have_plans_than_bounds(latency: Latency) -> None:
    """The point for unknown plans has one segment, so it may meet C11 although no plan does."""
    rng, gains = np.random.default_rng(0), (1.0, 1000.0)
    states = []
    for unit, limits in enumerate(([2.0] * 4, rng.integers(1, 6, 5).tolist())):
        own = tuple(
            DeviceProfile(
                f"device-{k}",
                AffineLaw(*map(float, rng.uniform(0, 1, 4))),
                memory=MemoryBudget(limit, 0.0, 1.0, 0.0),
            )
            for k, limit in enumerate(limits)
        )
        states.append(ClusterState(unit, own, 10, Uplink(1.0, 1e9, 1e4, 0.0, (gains[unit],) * 2)))
    request = replace(
        request_of(*devices(2)),
        clusters=tuple(states),
        num_blocks=6,
        channels=(Channel(1e6, 1.0, 1e-12),) * 2,
        queues=(50.0, 0.01),
        losses=(None, None),
    )
    strategy = Dssra(
        drift="paper",
        latency=latency,
        hard_gamma=True,
        segment_price="paper",
        kappa=0.1,
        gradient_bound=0.5,
        interference_constant_w=1.0,
        gamma_max=0.13,
    )
    best, found = (
        certificate(request, fronts(request, latency, solve, rng, strategy), strategy)
        for solve in (exact_partition, partial(exact_partition, max_nodes=0))
    )
    assert found.lower_bound <= best.objective <= found.objective


def test_the_bound_covers_a_unit_whose_search_found_no_plan() -> None:
    """The unit is not scheduled."""
    request = drawn_request("paper", 2)
    request = replace(request, queues=(1e4, *request.queues[1:]))
    lost, rng = present_devices(request.clusters[0]), np.random.default_rng(0)

    def found(cause: InfeasibleRoundError | None) -> tuple[Front, ...]:
        def solve(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
            if problem.devices == lost and cause:
                raise cause
            return exact_partition(problem)

        return fronts(request, "overlap", solve, rng, Dssra())

    all_plans, fewer, open_ones = map(
        found, (None, InfeasibleRoundError("none"), UnfinishedSearchError("none"))
    )
    assert known_plans(open_ones) == fewer and all_plans[1:] == fewer[1:]
    best, without, unknown = (
        certificate(request, each, Dssra()) for each in (all_plans, fewer, open_ones)
    )
    assert without.gap == pytest.approx(0, abs=1e-12)
    assert unknown.objective == without.objective > best.objective >= unknown.lower_bound


def with_sharing(request: RoundRequest, law: SharingLaw) -> RoundRequest:
    """Return the request in which all devices may share stages."""
    clusters = (
        replace(state, devices=tuple(replace(each, sharing=law) for each in state.devices))
        for state in request.clusters
    )
    return replace(request, clusters=tuple(clusters))
