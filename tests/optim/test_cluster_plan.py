"""How clusters are split: by the strategy or as a framework prescribes, over the devices there."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError, PlanViolationError
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
from optim import cluster_plan
from optim.allocation.exact import exact_allocation
from optim.baselines import AllUnits, EvenSplit, HighestLoss, RandomUnits, ShortestDelay
from optim.cluster_plan import activation_times, cluster_problem, fronts, solve_round
from optim.dssra import Dssra
from optim.latency import batch_s, partition_of
from optim.partition.exact import exact_partition
from optim.planner import Planner, RoundRequest
from optim.problem import ClusterSolver, Partition, RoundOptions
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


def request(*devices: DeviceProfile, partition: str | None = None) -> RoundRequest:
    """One cluster with one channel; 12 blocks."""
    state = ClusterState(7, devices, 10, Uplink(0.5, 10.0, 1e6, 2e6, (1.0,)))
    return RoundRequest(
        round=1,
        clusters=(state,),
        num_blocks=12,
        batch_size=16,
        local_steps=2,
        num_segments=None,
        num_micro_batches=16,
        schedule="gpipe",
        channels=(Channel(5e5, 0.07, 4e-21),),
        queues=(3.0,),
        losses=(None,),
        partition=partition,
    )


def plan(asked: RoundRequest, strategy: str = "dssra", seed: int = 0) -> RoundPlan:
    planned = STRATEGIES[strategy].plan_round(asked, np.random.default_rng(seed))
    verify_plan(planned, asked)
    return planned


def held(cluster: ClusterPlan) -> dict[str, int]:
    return {segment.device: segment.span.blocks for segment in cluster.segments}


def devices(*limits: int | None) -> tuple[DeviceProfile, ...]:
    """Each twice as slow as the one before."""
    return tuple(
        DeviceProfile(f"device-{k}", replace(LAW, u=LAW.u * 2**k), limit)
        for k, limit in enumerate(limits)
    )


@pytest.mark.parametrize("partition", FRAMEWORKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_is_away_holds_nothing(strategy: str, partition: str | None) -> None:
    """Whatever splits the blocks, and where it looks at no limits; the last unit is away."""
    for seed, preset in enumerate(("paper", "edge", "paper")[: cases(2, 3)]):
        asked = replace(drawn_request(preset, seed), partition=partition)
        there = {
            state.unit: {device.name for device in state.devices if device.max_blocks != 0}
            for state in asked.clusters
        }
        planned = plan(asked, strategy)
        assert planned.clusters
        for cluster in planned.clusters:
            assert cluster.unit != 60
            assert set(held(cluster)) <= there[cluster.unit]
            assert (not cluster.segments) == (partition == "vanilla_fl")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_device_that_is_away_changes_no_split(strategy: str) -> None:
    """Of the others: it is as if it did not exist."""
    present = devices(6, 6, 6)
    absent = away(DeviceProfile("absent", AffineLaw(1e-4, 0.0, 0.0, 0.0)))
    for partition in FRAMEWORKS:
        for place in range(4):
            mixed = (*present[:place], absent, *present[place:])
            with_it = plan(request(*mixed, partition=partition), strategy)
            without = plan(request(*present, partition=partition), strategy)
            assert with_it.clusters == without.clusters
            assert with_it.queues == without.queues


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_framework_prescribes_every_strategys_split(strategy: str) -> None:
    """Even: 4 each with m = 8. By speed: 4/7, 2/7 and 1/7 of 12."""
    for partition, blocks in (("pipeline", (4, 4, 4)), ("titanic", (7, 3, 2))):
        (cluster,) = plan(request(*devices(8, 8, 8), partition=partition), strategy).clusters
        assert held(cluster) == {f"device-{k}": count for k, count in enumerate(blocks)}
        assert cluster.num_micro_batches == 8
        assert not cluster.over_limits


def test_a_strategys_own_solver_stands_behind_the_frameworks() -> None:
    own = RandomUnits(1, partition="pipeline")
    for partition, first in ((None, 4), ("titanic", 7)):
        asked = request(*devices(8, 8, 8), partition=partition)
        (cluster,) = own.plan_round(asked, np.random.default_rng(0)).clusters
        assert held(cluster)["device-0"] == first


def test_replicas_share_the_batch_of_the_devices_that_are_there() -> None:
    """Two steps of the slower device's 12 blocks on 8 samples."""
    asked = request(*devices(12, 12), away(devices(1, 1, 1)[2]), partition="vanilla_fl")
    (cluster,) = plan(asked).clusters
    assert (cluster.segments, cluster.num_micro_batches) == ((), 1)
    assert cluster.latency_s == pytest.approx(2 * 12 * (0.02 * 8 + 0.001))
    assert not cluster.over_limits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("partition", FRAMEWORKS[1:])
def test_a_framework_that_looks_at_no_limits_breaks_them(strategy: str, partition: str) -> None:
    """The plan says so; the strategy itself keeps them."""
    asked = request(*devices(3, 3, 3), partition=partition)
    (cluster,) = plan(asked, strategy).clusters
    assert cluster.over_limits
    roomy = plan(request(*devices(None, None, None), partition=partition), strategy)
    assert (cluster.segments, cluster.latency_s) == (
        roomy.clusters[0].segments,
        roomy.clusters[0].latency_s,
    )
    with pytest.raises(InfeasibleRoundError, match="at most"):
        plan(replace(asked, partition=None), strategy)


def test_energy_is_a_limit_too() -> None:
    poor = replace(devices(None)[0], energy=EnergyBudget(1e-6, LAW))
    (cluster,) = plan(request(poor, partition="vanilla_fl")).clusters
    assert cluster.over_limits


@pytest.mark.parametrize(("room", "over"), [(0.5, True), (1.5, False)])
def test_replicas_on_real_devices_need_room_for_gradients(room: float, over: bool) -> None:
    """Each of three leads four of 12 blocks, or up to 14/3, and receives those of two others."""
    memory = MemoryBudget(12 * 20.0 + room * 2 * 14 / 3 * 5.0, 0.0, 20.0, 0.0, trained_bytes=5.0)
    three = tuple(replace(each, memory=memory) for each in devices(None, None, None))
    asked = request(*three, partition="vanilla_fl")
    assert not plan(asked).clusters[0].over_limits  # simulated ones add up nothing
    real = replace(asked, clusters=(replace(asked.clusters[0], real_devices=True),))
    (cluster,) = plan(real).clusters
    assert cluster.over_limits == over
    assert [len(each.devices) for each in cluster.segments] == [3]


def test_replicas_on_real_devices_may_exceed_an_owners_limit_of_shared_blocks() -> None:
    """With a word, as all of a framework's splits."""
    limits = SharingLaw(0.1, max_blocks=11), SharingLaw(0.1, max_blocks=12), None
    for law, over in zip(limits, (True, False, False), strict=True):
        three = tuple(replace(each, sharing=law) for each in devices(None, None, None))
        asked = request(*three, partition="vanilla_fl")
        real = replace(asked, clusters=(replace(asked.clusters[0], real_devices=True),))
        assert plan(real).clusters[0].over_limits == over


def test_memory_counts_what_the_schedule_keeps() -> None:
    """A block keeps a byte for each of 16 samples: GPipe keeps all, 1F1B three of 16."""
    memory = MemoryBudget(40.0, 0.0, 1.0 + 16.0, 0.0, 0.0, 16.0)
    two = tuple(replace(each, memory=memory) for each in devices(None, None))
    asked = request(*two)
    with pytest.raises(InfeasibleRoundError, match="hold at most 4 of 12 blocks"):
        plan(asked)
    planned = plan(replace(asked, schedule="one_f_one_b"))
    (cluster,) = planned.clusters
    assert sum(held(cluster).values()) == 12
    with pytest.raises(PlanViolationError, match="schedule: one_f_one_b, must be gpipe"):
        verify_plan(planned, asked)
    other = replace(planned, clusters=(replace(cluster, schedule="gpipe"),))
    with pytest.raises(PlanViolationError, match="C7"):
        verify_plan(other, asked)


def test_limits_favour_no_draw() -> None:
    """Each of three devices as often, though the second one's memory lacks a block."""
    alike = tuple(replace(device, time=LAW) for device in devices(12, 11, 12))
    asked = request(*alike, partition="no_segment_scheduling")
    asked = replace(asked, num_micro_batches=1)  # a second segment would not pay
    rng, seen = np.random.default_rng(0), Counter[str]()
    for _ in range(300):
        (cluster,) = Dssra().plan_round(asked, rng).clusters
        (device,) = held(cluster)
        seen[device] += 1
        assert cluster.over_limits == (device == "device-1")
    # χ² with 2 degrees of freedom exceeds 13.8 once in a thousand seeds; this one is fixed.
    assert sum((seen[device.name] - 100) ** 2 / 100 for device in alike) < 13.8


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_times_on_the_uplink_are_those_of_the_channels(drift: str, fading: str) -> None:
    """At the highest power on each, or any where the power is free; and none at all."""
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


def test_points_of_a_front_are_those_of_all_local_steps() -> None:
    """Each is the fastest at the ends of its range, of those with as few segments."""
    seen = 0
    for seed in range(2):
        asked = replace(drawn_request("paper", seed), local_steps=3)
        options = RoundOptions(drift="paper")
        times = activation_times([s.uplink for s in asked.clusters], asked.channels, options)
        found = fronts(asked, "overlap", exact_partition, np.random.default_rng(0), options)
        for state, front, uplinks in zip(asked.clusters, found, times, strict=True):
            for point in front:
                assert point.fastest_s[0] >= uplinks[0] * (1 - 1e-12)
                rest = [each for each in front if each.num_segments <= point.num_segments]
                for end in filter(math.isfinite, point.fastest_s):
                    least = min(batch_s(each, end) for each in rest)
                    assert batch_s(point, end) == pytest.approx(least, rel=1e-9)
                once = partition_of(
                    cluster_problem(asked, state, "overlap"), *held_by(point, state)
                )
                assert point.latency_s == pytest.approx(3 * once.latency_s, rel=1e-12)
                assert point.slowest_s == pytest.approx(3 * once.slowest_s, rel=1e-12)
                seen += len(rest) > 1
    assert seen > 20


def held_by(point: Partition, state: ClusterState) -> tuple[tuple[int, ...], int]:
    """δ of the devices that are there, and m."""
    pairs = zip(point.blocks, state.devices, strict=True)
    there = tuple(blocks for blocks, device in pairs if device.max_blocks != 0)
    return there, point.num_micro_batches


def test_a_round_in_which_nobody_can_take_part_says_what_becomes_of_the_queues() -> None:
    """They grow as those of idle units; strategies without queues say nothing."""
    asked = request(*devices(0, 0))
    idle = 0.08 / 0.07 + 0.1
    reason = "unit 7: each of its 2 devices is away .* federation.on_infeasible=skip waits"
    with pytest.raises(InfeasibleRoundError, match=reason) as caught:
        plan(asked)
    assert caught.value.queues == pytest.approx((3.0 + idle - 0.84,))
    for strategy in ("even", "all", "random"):
        with pytest.raises(InfeasibleRoundError, match=reason) as caught:
            plan(asked, strategy)
        assert caught.value.queues == ()


def test_what_is_away_is_named_where_the_others_are_too_few() -> None:
    """Not where all are there, and all are too few."""
    waits = "1 of its 3 devices are away or hold no block: federation.on_infeasible=skip waits"
    with pytest.raises(InfeasibleRoundError, match=waits):
        plan(request(*devices(2, 0, 2)))
    with pytest.raises(InfeasibleRoundError) as caught:
        plan(request(*devices(2, 2, 2)))
    assert "on_infeasible" not in str(caught.value)


@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_stages_that_are_too_dear_to_share_change_no_round(preset: str) -> None:
    """Units that are not the slowest have as few segments as without sharing."""
    several = 0
    for seed in range(cases(few=3, many=20)):
        asked = with_sharing(drawn_request(preset, seed), SharingLaw(1e6))
        auto, never = (
            Dssra(sharing=each).plan_round(asked, np.random.default_rng(0)).clusters
            for each in ("auto", "never")
        )
        assert auto == never
        several += any(len(one.segments) > 1 for one in auto)
    assert several


@pytest.mark.parametrize("uplink", ["streamed", "after"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_a_round_whose_clusters_were_not_searched_to_the_end_has_a_bound(
    drift: str, uplink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After no node, or because devices were too many to tell apart."""
    strategy, hurried = Dssra(drift=drift, uplink=uplink), partial(exact_partition, max_nodes=0)
    useful = 0
    for seed in range(cases(few=2, many=40)):
        asked = with_sharing(drawn_request("paper", seed), SharingLaw(0.02))
        pairs = [(hurried, 2**17, exact_partition), (shared_partition, 30, shared_partition)]
        for solve, most, exact in pairs[: 1 if strategy.prices_segments else 2]:
            best = solved(asked, strategy, exact)
            monkeypatch.setattr("optim.sharing.exact.MOST_PAIRS", most)
            monkeypatch.setattr("optim.sharing.exact._MOST_MERGED", most)
            found = solved(asked, strategy, solve)
            monkeypatch.undo()
            assert best.gap == pytest.approx(0, abs=1e-12)
            assert found.lower_bound <= best.objective * (1 + 1e-9) <= found.objective * (1 + 2e-9)
            useful += found.lower_bound > 0
    assert useful


def solved(asked: RoundRequest, strategy: Dssra, solve: ClusterSolver) -> Certificate:
    """The certificate of the round whose clusters are split by ``solve``."""
    points = fronts(asked, "overlap", solve, np.random.default_rng(0), strategy)
    cluster_plan._fronts.clear()
    return solve_round(asked, points, asked.queues, strategy, exact_allocation)[1].certificate


def with_sharing(asked: RoundRequest, law: SharingLaw) -> RoundRequest:
    """The round in which all devices may share stages."""
    clusters = (
        replace(state, devices=tuple(replace(each, sharing=law) for each in state.devices))
        for state in asked.clusters
    )
    return replace(asked, clusters=tuple(clusters))
