"""A round's time and energy, compared with a discrete-event simulation that shares no formula.

Pipelines run chunk by chunk. The activations' uplink is a station of the pipeline or follows it;
the head and the downlink are the last stations. Uploads run packet by packet.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.integrate import quad

from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.report import ClusterCost, RoundCost
from collapipe.state import AffineLaw, ClusterState, DeviceProfile
from optim.cost import round_cost, stem_seconds, with_stem
from optim.dssra import Dssra
from optim.planner import RoundRequest
from tests.optim.discrete_event import Line, Station
from tests.optim.drawn_requests import drawn_request, with_later_stages
from tests.thorough import cases

PRESETS = pytest.mark.parametrize("preset", ["paper", "edge"])
UPLINKS = pytest.mark.parametrize("uplink", ["streamed", "after"])
PACKETS = 50  # per upload


@dataclass(frozen=True)
class Simulated:
    """Times and energy of a unit's simulated round.

    ``pipeline_s`` excludes the uplink. ``end_s`` is the end of the pipelines and the upload.
    """

    pipeline_s: float
    upload_s: float
    end_s: float
    upload_j: float
    device_j: dict[str, float]


def planned(request: RoundRequest, **options: str | float) -> RoundPlan:
    """Plan a round in which units pay only for the model's upload, so that all can take part."""
    return Dssra(energy="adapters", **options).plan_round(
        request, np.random.default_rng(request.round)
    )


def stations(device: DeviceProfile, blocks: int, size: float, law: str) -> list[Station]:
    """Return a device and its link; they are one station if it cannot send while it computes."""
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


def lines(
    plan: ClusterPlan, state: ClusterState, request: RoundRequest, law: str, uplink: Station | None
) -> list[Line]:
    """Return one pipeline, or for replicas a separate line for each present device.

    The uplink, if it is a station, follows the pipeline's last device. The head and the downlink
    come last, and their times are divided among all local steps.
    """
    if not plan.segments:
        there = [device for device in state.devices if device.max_blocks != 0]
        size = request.batch_size / len(there)
        return [Line(stations(d, request.num_blocks, size, "overlap")[:1]) for d in there]
    size, places = request.batch_size / plan.num_micro_batches, []
    for segment in plan.segments:
        (device,) = (each for each in state.devices if each.name == segment.device)
        places += stations(device, segment.span.blocks, size, law)
    parts = request.local_steps * plan.num_micro_batches
    places += [uplink] if uplink else []
    places.append(Station("server", state.uplink.head_s / parts, 0.0))
    places.append(Station("downlink", state.uplink.gradient_s / parts, 0.0))
    return [Line(places)]


def bits_per_s(plan: ClusterPlan, state: ClusterState, request: RoundRequest, fading: str) -> float:
    """Return Shannon's rate, or its mean over an exponentially distributed gain."""
    band, gain = request.channels[plan.uplink.channel], state.uplink.gains[plan.uplink.channel]
    noise = band.interference_w + band.noise_w_per_hz * band.bandwidth_hz
    snr = gain * plan.uplink.power_w / noise
    if fading == "none":
        return band.bandwidth_hz * math.log2(1 + snr)
    mean, _ = quad(lambda x: math.exp(-x) * math.log2(1 + snr * x), 0, 60, epsrel=1e-12, limit=200)
    return band.bandwidth_hz * mean


def end_of_steps(pipelines: list[Line], plan: ClusterPlan, request: RoundRequest) -> float:
    """Return the time at which the last local step ends."""
    end_s = 0.0
    for _ in range(request.local_steps):
        for line in pipelines:
            line.run(plan.num_micro_batches)
        # The next step needs the gradients of all lines.
        end_s = max(line.clock_s for line in pipelines)
        for line in pipelines:
            line.clock_s = end_s
    return end_s


def simulated(
    plan: ClusterPlan, request: RoundRequest, law: str, fading: str, uplink: str
) -> Simulated:
    (state,) = (each for each in request.clusters if each.unit == plan.unit)
    rate, power_w = bits_per_s(plan, state, request, fading), plan.uplink.power_w
    before_s, shared_radio = state.uplink.activation_bits / rate, None
    if uplink == "streamed" and plan.segments:
        each_s = before_s / request.local_steps / plan.num_micro_batches
        before_s, shared_radio = 0.0, Station("radio", each_s, power_w * each_s)
    pipelines = lines(plan, state, request, law, shared_radio)
    end_s = end_of_steps(pipelines, plan, request)
    alone_s = end_of_steps(lines(plan, state, request, law, None), plan, request)
    packet_s = (before_s + state.uplink.model_bits / rate) / PACKETS
    radio = Line([Station("radio", packet_s, power_w * packet_s)], clock_s=end_s)
    radio.run(PACKETS)
    upload_s = (state.uplink.activation_bits + state.uplink.model_bits) / rate
    spent = dict[str, float]()
    for line in [*pipelines, radio]:
        for name, joules in line.spent_j.items():
            spent[name] = spent.get(name, 0.0) + joules
    return Simulated(alone_s, upload_s, radio.clock_s, spent.pop("radio"), spent)


def check(
    cost: RoundCost,
    plan: RoundPlan,
    request: RoundRequest,
    law: str = "overlap",
    fading: str = "none",
    uplink: str = "streamed",
) -> None:
    """Compare times and energy of all units with the simulation."""
    assert [each.unit for each in cost.clusters] == [each.unit for each in plan.clusters]
    runs = [simulated(each, request, law, fading, uplink) for each in plan.clusters]
    assert cost.delay_s == pytest.approx(max(run.end_s for run in runs), rel=1e-9)
    budgets = {
        state.unit: {device.name for device in state.devices if device.energy is not None}
        for state in request.clusters
    }
    for modelled, run, claimed in zip(cost.clusters, runs, plan.clusters, strict=True):
        assert modelled.pipeline_s == pytest.approx(run.pipeline_s, rel=1e-9)
        assert claimed.latency_s == pytest.approx(run.pipeline_s, rel=1e-9)
        assert modelled.upload_s == pytest.approx(run.upload_s, rel=1e-9)
        assert modelled.finish_s == pytest.approx(run.end_s, rel=1e-9)
        assert claimed.uplink.finish_s == pytest.approx(run.end_s, rel=1e-9)
        assert claimed.uplink.upload_s == pytest.approx(modelled.upload_s, rel=1e-9)
        assert modelled.upload_energy_j == pytest.approx(run.upload_j, rel=1e-9)
        assert set(modelled.device_energy_j) == set(run.device_j) & budgets[modelled.unit]
        for name, joules in modelled.device_energy_j.items():
            assert joules == pytest.approx(run.device_j[name], rel=1e-9)


@PRESETS
@UPLINKS
@pytest.mark.parametrize("law", ["overlap", "flow_shop"])
def test_times_and_energy_match_the_simulation(preset: str, law: str, uplink: str) -> None:
    """The plan's own times match as well. Only a streamed upload overlaps with the pipeline."""
    segments, hidden, drawn = set(), 0, cases(2, 10)
    for seed in range(drawn):
        request = drawn_request(preset, seed)
        request = with_later_stages(request, seed) if seed % 2 else request
        plan = planned(request, latency=law, drift_weight=10.0, uplink=uplink)
        cost = round_cost(plan, request, law, "none", uplink)
        check(cost, plan, request, law, "none", uplink)
        segments |= {len(each.segments) for each in plan.clusters}
        together = [each.pipeline_s + each.upload_s for each in cost.clusters]
        hidden += sum(
            each.finish_s < both * (1 - 1e-9)
            for each, both in zip(cost.clusters, together, strict=True)
        )
    assert len(segments) > 1
    assert (hidden > 2 * drawn) == (uplink == "streamed")


@PRESETS
@pytest.mark.parametrize(
    "partition", ["vanilla_fl", "titanic", "pipeline", "no_segment_scheduling"]
)
@UPLINKS
def test_times_and_energy_of_every_framework_match_the_simulation(
    preset: str, partition: str, uplink: str
) -> None:
    for seed in range(3):
        request = with_later_stages(drawn_request(preset, seed), seed)
        request = replace(request, partition=partition)
        plan = planned(request, uplink=uplink)
        cost = round_cost(plan, request, "overlap", "none", uplink)
        check(cost, plan, request, uplink=uplink)


@PRESETS
def test_times_and_energy_under_the_papers_drift_match_the_simulation(preset: str) -> None:
    """Some units send with less than half of their power, because other units take longer."""
    for seed in range(3):
        request = with_later_stages(drawn_request(preset, seed), seed)
        plan = planned(request, drift="paper")
        check(round_cost(plan, request, "overlap", "none", "streamed"), plan, request)
        limits = {state.unit: state.uplink.max_power_w for state in request.clusters}
        assert any(each.uplink.power_w < limits[each.unit] / 2 for each in plan.clusters)


def test_rates_are_means_over_fading() -> None:
    request = drawn_request("edge", 1)
    plan = planned(request, fading="rayleigh")
    cost = round_cost(plan, request, "overlap", "rayleigh", "streamed")
    check(cost, plan, request, fading="rayleigh")
    steady = round_cost(plan, request, "overlap", "none", "streamed")
    assert steady.clusters[0].upload_s < plan.clusters[0].uplink.upload_s


def test_costs_do_not_depend_on_the_times_that_a_plan_claims() -> None:
    request = drawn_request("paper", 0)
    plan = planned(request)
    clusters = (
        replace(each, latency_s=1.0, uplink=replace(each.uplink, upload_s=1.0, finish_s=1.0))
        for each in plan.clusters
    )
    boasting = replace(plan, clusters=tuple(clusters))
    costs = [round_cost(each, request, "overlap", "none", "streamed") for each in (boasting, plan)]
    assert costs[0] == costs[1]


def test_a_round_without_units_or_without_uplinks_has_no_such_cost() -> None:
    request = drawn_request("paper", 0)
    for uplink in ("streamed", "after"):
        empty = round_cost(RoundPlan(1, ()), request, "overlap", "none", uplink)
        assert empty == RoundCost(0.0, ())
    silent = tuple(replace(each, uplink=None) for each in planned(request).clusters)
    cost = round_cost(RoundPlan(1, silent), request, "overlap", "none", "streamed")
    assert cost.delay_s == max(each.pipeline_s for each in cost.clusters)
    assert [each.finish_s for each in cost.clusters] == [each.pipeline_s for each in cost.clusters]
    assert {(each.upload_s, each.upload_energy_j) for each in cost.clusters} == {(None, 0.0)}


def test_a_stem_is_computed_row_by_row_on_the_fastest_device() -> None:
    """The device sends back each row's activation. A unit's first step begins after its stem."""
    laws = [
        AffineLaw(1.0, 0.5, 0.0, 9.0),
        AffineLaw(2.0, 1.0, 0.25, 0.75),
    ]  # the first sends slowly
    devices = tuple(DeviceProfile(f"device-{k}", law) for k, law in enumerate(laws))
    cluster = ClusterState(0, devices, 10)
    assert stem_seconds(cluster, 4, 0.5, 7) == 7 * (0.5 * 4 * (2.0 + 1.0) + 0.25 + 0.75)
    assert stem_seconds(cluster, 0, 0.5, 7) == stem_seconds(cluster, 4, 0.5, 0) == 0
    costs = tuple(ClusterCost(unit, 1.0, None, 0.0, {}, 2.0 + unit) for unit in range(2))
    late = with_stem(RoundCost(3.0, costs), {0: 5.0})
    assert late.delay_s == 7.0
    assert [each.ends_s for each in late.clusters] == [7.0, 3.0]
