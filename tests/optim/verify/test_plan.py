"""A strategy's plan is verified against the clusters of the request."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_request import request_for

from collapipe.errors import PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan, SegmentPlan, Span, UplinkPlan
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, EnergyBudget, Uplink
from optim.baselines import EvenSplit
from optim.planner import RoundRequest
from optim.verify import verify_plan

LAW = AffineLaw(1.0, 0.0, 0.0, 0.0)
DEVICES = (
    DeviceProfile("a", LAW, 2),
    DeviceProfile("b", LAW, None, EnergyBudget(16.0, LAW)),
    DeviceProfile("c", LAW),
)
UPLINK = Uplink(0.2, 1.0, 1.0, 0.0, (1.0, 1.0))
CLUSTERS = [ClusterState(unit, DEVICES, 10, UPLINK) for unit in (3, 5)]
REQUEST = request_for(CLUSTERS, 6, 8, 4, "gpipe", channels=(Channel(1.0, 1.0, 1.0),) * 2)


def plan(*held: tuple[str, int], unit: int = 3, m: int = 4, channel: int = 0) -> ClusterPlan:
    segments, first = [], 0
    for device, blocks in held:
        segments.append(SegmentPlan(device, Span(first, blocks)))
        first += blocks
    return ClusterPlan(unit, tuple(segments), m, "gpipe", uplink=UplinkPlan(channel, 0.1, 1.0, 1.0))


def sends(cluster: ClusterPlan, power_w: float) -> ClusterPlan:
    return replace(cluster, uplink=replace(cluster.uplink, power_w=power_w))


SOUND = plan(("a", 2), ("b", 2), ("c", 2))


def test_a_valid_plan_passes() -> None:
    other = plan(("c", 4), ("a", 2), unit=5, channel=1)
    verify_plan(RoundPlan(1, (SOUND, other)), REQUEST)
    verify_plan(EvenSplit().plan_round(REQUEST, np.random.default_rng(0)), REQUEST)


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ((plan(("a", 3), ("c", 3)),), "unit 3: C7: a holds 3 blocks, its limit is 2"),
        ((plan(("b", 3), ("c", 3)),), "unit 3: C9': b spends 24 J a batch on 3 blocks"),
        ((plan(("a", 2), ("c", 3)),), "unit 3: C1: stages hold 5 blocks, not L=6"),
        ((plan(("c", 6), m=9),), "unit 3: C1: .*m=9, must be 1 to 8"),
        ((plan(("c", 3), ("d", 3)),), "unit 3: C2: segments on d; the devices are a, b, c"),
        ((plan(("c", 3), ("c", 3)),), "unit 3: C2: segments on c"),
        ((replace(SOUND, unit=4),), "C3: unit 4: the request has units"),
        ((SOUND, replace(SOUND, uplink=None)), "C5: units"),
        ((SOUND, plan(("c", 6), unit=5)), "C5: channels"),
        ((plan(("c", 6), channel=2),), "unit 3: C3: channel 2 of 2; the unit reported 2 gains"),
        ((sends(SOUND, 0.3),), r"unit 3: C6: 0\.3 W of 0\.2 W"),
        ((sends(SOUND, -0.1),), "unit 3: C6: -0.1 W"),
        ((sends(SOUND, float("nan")),), "unit 3: C6: nan W"),
        ((sends(SOUND, 0.0),), "unit 3: C6: channel 0: without power or gain nothing is sent"),
        ((replace(SOUND, segments=()),), "unit 3: C1: .* sum up to 0, not L=6"),
        ((replace(SOUND, over_limits=True),), "unit 3: C7: a plan over limits"),
    ],
)
def test_every_violation_is_named(clusters: tuple[ClusterPlan, ...], message: str) -> None:
    with pytest.raises(PlanViolationError, match=message):
        verify_plan(RoundPlan(1, clusters), REQUEST)


def test_a_plan_of_another_round_is_refused() -> None:
    with pytest.raises(PlanViolationError, match="round: 0, the request is of round 1"):
        verify_plan(RoundPlan(0, (SOUND,)), REQUEST)


def test_a_channel_needs_an_uplink() -> None:
    state = replace(REQUEST.clusters[0], uplink=None)
    with pytest.raises(PlanViolationError, match="C3: channel 0 of 2; the unit reported 0 gains"):
        verify_plan(RoundPlan(1, (SOUND,)), replace(REQUEST, clusters=(state,)))


def test_activations_alone_need_power_too() -> None:
    sends_no_model = replace(UPLINK, model_bits=0.0, activation_bits=1.0)
    state = replace(REQUEST.clusters[0], uplink=sends_no_model)
    with pytest.raises(PlanViolationError, match="C6: channel 0: without power or gain nothing"):
        verify_plan(RoundPlan(1, (sends(SOUND, 0.0),)), replace(REQUEST, clusters=(state,)))


def framework(partition: str, *devices: DeviceProfile) -> RoundRequest:
    state = ClusterState(3, devices, 10, UPLINK)
    return replace(REQUEST, partition=partition, clusters=(state,))


def test_a_framework_may_exceed_limits_but_not_use_absent_devices() -> None:
    away = DeviceProfile("d", LAW, 0)
    request = framework("titanic", *DEVICES, away)
    greedy = replace(plan(("a", 3), ("b", 3)), over_limits=True)
    verify_plan(RoundPlan(1, (greedy,)), request)
    with pytest.raises(PlanViolationError, match="C7: a holds 3 blocks, its limit is 2"):
        verify_plan(RoundPlan(1, (replace(greedy, over_limits=False),)), request)
    absent = replace(plan(("a", 3), ("d", 3)), over_limits=True)
    with pytest.raises(PlanViolationError, match="C7: d holds 3 blocks, its limit is 0"):
        verify_plan(RoundPlan(1, (absent,)), request)


def test_limits_of_replicas_are_checked_on_every_present_device() -> None:
    """Each of two devices computes four of 8 samples: 24 J for six blocks. A single one needs 48
    J."""
    law, away = AffineLaw(1.0, 0.0, 9.0, 9.0), DeviceProfile("d", LAW, 0)
    one, other = DeviceProfile("a", LAW, 6), DeviceProfile("b", LAW, None, EnergyBudget(24.0, law))
    replicas = replace(SOUND, segments=(), num_micro_batches=1)
    sound = RoundPlan(1, (replicas,))
    verify_plan(sound, framework("vanilla_fl", one, other, away))
    with pytest.raises(PlanViolationError, match="C9': b spends 48 J"):
        verify_plan(sound, framework("vanilla_fl", other, away))
    over = RoundPlan(1, (replace(replicas, over_limits=True),))
    verify_plan(over, framework("vanilla_fl", other, away))
    small = replace(one, max_blocks=5)
    with pytest.raises(PlanViolationError, match="C7: a holds 6 blocks, its limit is 5"):
        verify_plan(sound, framework("vanilla_fl", small, other))
    with pytest.raises(PlanViolationError, match="C2: replicas on 1 devices, all of them away"):
        verify_plan(over, framework("vanilla_fl", away))
    with pytest.raises(PlanViolationError, match="C1: replicas with m=4"):
        cut = replace(replicas, num_micro_batches=4)
        verify_plan(RoundPlan(1, (cut,)), framework("vanilla_fl", one, other))
    with pytest.raises(PlanViolationError, match=r"C1: .* sum up to 0"):
        verify_plan(sound, framework("titanic", one, other))


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "name", ["queues", "idle_queues", "error_queues", "latency_s", "upload_s", "finish_s"]
)
def test_impossible_figures_of_a_plan_are_refused(name: str, figure: float) -> None:
    changed = RoundPlan(1, (SOUND,))
    if name == "latency_s":
        changed = replace(changed, clusters=(replace(SOUND, latency_s=figure),))
    elif name in ("upload_s", "finish_s"):
        uplink = replace(UplinkPlan(0, 0.1, 1.0, 1.0), **{name: figure})
        changed = replace(changed, clusters=(replace(SOUND, uplink=uplink),))
    else:
        changed = replace(changed, **{name: (0.0, figure)})
    with pytest.raises(PlanViolationError, match=f"^{name}.* must be finite and not negative"):
        verify_plan(changed, REQUEST)


@pytest.mark.parametrize("name", ["gammas", "queues", "idle_queues", "error_queues"])
def test_queues_must_be_empty_or_have_one_value_per_unit(name: str) -> None:
    sound = RoundPlan(1, (SOUND,))
    verify_plan(replace(sound, **{name: (0.5, 0.5)}), REQUEST)
    with pytest.raises(PlanViolationError, match=f"C10: 1 {name} of 2 units"):
        verify_plan(replace(sound, **{name: (0.5,)}), REQUEST)
