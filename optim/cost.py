"""What a round costs in the scheduler's world, computed from its plan's segments and uplinks.

The times that the plan itself claims are not used. Energy is eq. 16's without its factor 2: the
bracket already holds both passes and both transfers (docs/optim.md).
"""

from dataclasses import replace

import numpy as np

from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.report import ClusterCost, RoundCost
from collapipe.state import Channel, ClusterState
from optim.latency import pipeline_latency
from optim.planner import RoundRequest, present_devices
from optim.problem import Latency
from optim.radio.channel import Fading, links

Step = tuple[float, dict[str, float]]
"""Seconds of a local step, and joules by device."""


def round_cost(
    plan: RoundPlan, request: RoundRequest, latency: Latency, fading: Fading
) -> RoundCost:
    """Time and energy of a verified plan's units; a round without any takes no time."""
    states = {state.unit: state for state in request.clusters}
    costs = tuple(
        _cluster_cost(cluster, states[cluster.unit], request, latency, fading)
        for cluster in plan.clusters
    )
    delays = (cost.pipeline_s + (cost.upload_s or 0.0) for cost in costs)
    return RoundCost(max(delays, default=0.0), costs)


def _cluster_cost(
    cluster: ClusterPlan,
    state: ClusterState,
    request: RoundRequest,
    latency: Latency,
    fading: Fading,
) -> ClusterCost:
    steps, upload_s, upload_j = request.local_steps, None, 0.0
    if cluster.segments:
        seconds, joules = _pipelined(cluster, state, request.batch_size, latency)
    else:
        seconds, joules = _replicated(state, request)
    if cluster.uplink is not None:
        upload_s = _upload_s(cluster.uplink, state, request.channels, fading)
        upload_j = cluster.uplink.power_w * upload_s
    total_j = {name: steps * spent for name, spent in joules.items()}
    return ClusterCost(cluster.unit, steps * seconds, upload_s, upload_j, total_j)


def _pipelined(
    cluster: ClusterPlan, state: ClusterState, batch_size: int, latency: Latency
) -> Step:
    m, known = cluster.num_micro_batches, {device.name: device for device in state.devices}
    devices = [known[segment.device] for segment in cluster.segments]
    blocks = [segment.span.blocks for segment in cluster.segments]
    seconds = pipeline_latency(devices, blocks, batch_size, m, latency)
    return seconds, {
        device.name: m * device.energy.law.chunk(count, batch_size / m)
        for device, count in zip(devices, blocks, strict=True)
        if device.energy is not None
    }


def _replicated(state: ClusterState, request: RoundRequest) -> Step:
    """Each device computes all L blocks on b/K samples, and sends nothing."""
    devices = present_devices(state)
    share, blocks = request.batch_size / len(devices), request.num_blocks
    return max(device.time.compute(blocks, share) for device in devices), {
        device.name: device.energy.law.compute(blocks, share)
        for device in devices
        if device.energy is not None
    }


def _upload_s(
    planned: UplinkPlan, state: ClusterState, channels: tuple[Channel, ...], fading: Fading
) -> float:
    """τ_n^Up (eq. 11) at the planned power."""
    assert state.uplink is not None, "a verified plan has no channel for a unit without an uplink"
    uplink = replace(state.uplink, gains=(state.uplink.gains[planned.channel],))
    pair = links([uplink], [channels[planned.channel]], fading)
    return float(pair.uploads(np.array(planned.power_w)).item())
