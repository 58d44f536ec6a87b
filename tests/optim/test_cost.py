"""A round's clock and energy against a simulation of its events that shares no formula.

Pipelines run chunk by chunk, uploads packet by packet.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.integrate import quad

from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.report import RoundCost
from collapipe.state import ClusterState, DeviceProfile
from optim.cost import round_cost
from optim.dssra import Dssra
from optim.planner import RoundRequest
from tests.optim.discrete_event import Line, Station
from tests.optim.drawn_requests import drawn_request

PRESETS = pytest.mark.parametrize("preset", ["paper", "edge"])
PACKETS = 50  # of an upload


@dataclass(frozen=True)
class Simulated:
    """A unit's round: when its pipelines and its upload end, and who spent what."""

    pipeline_s: float
    end_s: float
    upload_j: float
    device_j: dict[str, float]


def planned(asked: RoundRequest, **options: str | float) -> RoundPlan:
    return Dssra(**options).plan_round(asked, np.random.default_rng(asked.round))


def stations(device: DeviceProfile, blocks: int, size: float, law: str) -> list[Station]:
    """A device and its link, which are one where it cannot send while it computes."""
    time = device.time
    compute = Station(device.name, blocks * (time.u * size + time.v), 0.0)
    hop = Station(device.name, time.w * size + time.ell, 0.0)
    if device.energy is not None:
        cost = device.energy.law
        compute = replace(compute, joules=blocks * cost.u * size + blocks * cost.v)
        hop = replace(hop, joules=cost.w * size + cost.ell)
    if law == "overlap":
        return [compute, hop]
    return [Station(device.name, compute.seconds + hop.seconds, compute.joules + hop.joules)]


def lines(plan: ClusterPlan, state: ClusterState, asked: RoundRequest, law: str) -> list[Line]:
    """One pipeline; or, of replicas, a line of its own for each device that is there."""
    if not plan.segments:
        there = [device for device in state.devices if device.max_blocks != 0]
        size = asked.batch_size / len(there)
        return [Line(stations(d, asked.num_blocks, size, "overlap")[:1]) for d in there]
    size, places = asked.batch_size / plan.num_micro_batches, []
    for segment in plan.segments:
        (device,) = (each for each in state.devices if each.name == segment.device)
        places += stations(device, segment.span.blocks, size, law)
    return [Line(places)]


def bits_per_s(plan: ClusterPlan, state: ClusterState, asked: RoundRequest, fading: str) -> float:
    """Shannon's, or its mean over a gain that is exponentially distributed."""
    band, gain = asked.channels[plan.uplink.channel], state.uplink.gains[plan.uplink.channel]
    noise = band.interference_w + band.noise_w_per_hz * band.bandwidth_hz
    snr = gain * plan.uplink.power_w / noise
    if fading == "none":
        return band.bandwidth_hz * math.log2(1 + snr)
    mean, _ = quad(lambda x: math.exp(-x) * math.log2(1 + snr * x), 0, 60, epsrel=1e-12, limit=200)
    return band.bandwidth_hz * mean


def simulated(plan: ClusterPlan, asked: RoundRequest, law: str, fading: str) -> Simulated:
    (state,) = (each for each in asked.clusters if each.unit == plan.unit)
    pipelines = lines(plan, state, asked, law)
    for _ in range(asked.local_steps):
        for line in pipelines:
            line.run(plan.num_micro_batches)
        # The next step needs the gradients of all.
        end_s = max(line.clock_s for line in pipelines)
        for line in pipelines:
            line.clock_s = end_s
    bits = state.uplink.model_bits + state.uplink.activation_bits
    packet_s = bits / PACKETS / bits_per_s(plan, state, asked, fading)
    radio = Line([Station("radio", packet_s, plan.uplink.power_w * packet_s)], clock_s=end_s)
    radio.run(PACKETS)
    meters = (line.spent_j for line in pipelines)
    spent = {name: joules for meter in meters for name, joules in meter.items()}
    return Simulated(end_s, radio.clock_s, radio.spent_j["radio"], spent)


def check(cost: RoundCost, plan: RoundPlan, asked: RoundRequest, law: str, fading: str) -> None:
    """Clock and energy of all units."""
    assert [each.unit for each in cost.clusters] == [each.unit for each in plan.clusters]
    runs = [simulated(each, asked, law, fading) for each in plan.clusters]
    assert cost.delay_s == pytest.approx(max(run.end_s for run in runs), rel=1e-9)
    budgets = {
        state.unit: {device.name for device in state.devices if device.energy is not None}
        for state in asked.clusters
    }
    for told, run, claimed in zip(cost.clusters, runs, plan.clusters, strict=True):
        assert told.pipeline_s == pytest.approx(run.pipeline_s, rel=1e-9)
        assert claimed.latency_s == pytest.approx(run.pipeline_s, rel=1e-9)
        assert told.upload_s == pytest.approx(run.end_s - run.pipeline_s, rel=1e-9)
        assert claimed.uplink.upload_s == pytest.approx(told.upload_s, rel=1e-9)
        assert told.upload_energy_j == pytest.approx(run.upload_j, rel=1e-9)
        assert set(told.device_energy_j) == set(run.device_j) & budgets[told.unit]
        for name, joules in told.device_energy_j.items():
            assert joules == pytest.approx(run.device_j[name], rel=1e-9)


@PRESETS
@pytest.mark.parametrize("law", ["overlap", "flow_shop"])
def test_clock_and_energy_are_those_of_a_discrete_event_simulation(preset: str, law: str) -> None:
    """Ten rounds each; the plan's own figures are the same."""
    segments = set()
    for seed in range(10):
        asked = drawn_request(preset, seed)
        plan = planned(asked, latency=law, drift_weight=10.0)
        check(round_cost(plan, asked, law, "none"), plan, asked, law, "none")
        segments |= {len(each.segments) for each in plan.clusters}
    assert len(segments) > 1


@PRESETS
@pytest.mark.parametrize(
    "partition", ["vanilla_fl", "titanic", "pipeline", "no_segment_scheduling"]
)
def test_so_are_those_of_every_framework(preset: str, partition: str) -> None:
    for seed in range(3):
        asked = replace(drawn_request(preset, seed), partition=partition)
        plan = planned(asked)
        check(round_cost(plan, asked, "overlap", "none"), plan, asked, "overlap", "none")


def test_rates_are_means_over_fading() -> None:
    asked = drawn_request("edge", 1)
    plan = planned(asked, fading="rayleigh")
    check(round_cost(plan, asked, "overlap", "rayleigh"), plan, asked, "overlap", "rayleigh")
    steady = round_cost(plan, asked, "overlap", "none")
    assert steady.clusters[0].upload_s < plan.clusters[0].uplink.upload_s


def test_what_a_plan_claims_is_not_believed() -> None:
    asked = drawn_request("paper", 0)
    plan = planned(asked)
    clusters = (
        replace(each, latency_s=1.0, uplink=replace(each.uplink, upload_s=1.0))
        for each in plan.clusters
    )
    boasting = replace(plan, clusters=tuple(clusters))
    assert round_cost(boasting, asked, "overlap", "none") == round_cost(
        plan, asked, "overlap", "none"
    )


def test_a_round_without_units_costs_nothing_and_one_without_uplinks_no_upload() -> None:
    asked = drawn_request("paper", 0)
    assert round_cost(RoundPlan(1, ()), asked, "overlap", "none") == RoundCost(0.0, ())
    silent = tuple(replace(each, uplink=None) for each in planned(asked).clusters)
    cost = round_cost(RoundPlan(1, silent), asked, "overlap", "none")
    assert cost.delay_s == max(each.pipeline_s for each in cost.clusters)
    assert {(each.upload_s, each.upload_energy_j) for each in cost.clusters} == {(None, 0.0)}
