"""Modelled time and energy of a round, computed from its plan's segments and uplinks.

The times in the plan are not used. Energy follows eq. 16 without its factor 2, because the bracket
already includes both passes and both transfers (docs/explanation/paper.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.report import ClusterCost, RoundCost
from collapipe.state import Channel, ClusterState
from collapipe.step_law import StepLaw
from optim.cluster.problem import as_planned, cluster_problem
from optim.latency import streamed_s
from optim.planner import RoundRequest, present_devices
from optim.problem import Latency
from optim.round.channel import links
from optim.sharing.law import energy_j, partition_of_plan
from optim.simulated_plan import law_for, simulated, simulates


@dataclass(frozen=True, slots=True)
class _Step:
    """A local step: its seconds, the slowest stage's seconds per micro-batch, joules by device, and
    the prediction's ``spread``."""

    seconds: float
    slowest_s: float
    device_j: dict[str, float]
    spread: float = 0.0


def round_cost(
    plan: RoundPlan, request: RoundRequest, latency: Latency, fading: str, uplink: str
) -> RoundCost:
    """Return time and energy of a verified plan's units; a round without units takes no time.

    ``uplink`` is ``streamed`` or ``after``, see ``RoundOptions``.
    """
    states = {state.unit: state for state in request.clusters}
    costs = tuple(
        _cluster_cost(cluster, states[cluster.unit], request, latency, fading, uplink)
        for cluster in plan.clusters
    )
    return RoundCost(max((cost.ends_s for cost in costs), default=0.0), costs)


def sending_s(bits: Mapping[int, float], request: RoundRequest, fading: str) -> float:
    """Return the seconds in which units send ``bits`` outside of a round's local steps.

    Units send one after another, each at full power on its fastest channel. A unit without a
    modelled uplink or a usable channel takes no time.
    """
    states = [each for each in request.clusters if each.uplink and bits.get(each.unit)]
    uplinks = [each.uplink for each in states if each.uplink]
    pairs = links(uplinks, request.channels, fading, energy="all").at(0)
    rates = pairs.rates(pairs.max_power_w).max(axis=1, initial=0.0)
    amounts = np.array([bits[each.unit] for each in states])
    return float(np.sum(amounts[rates > 0] / rates[rates > 0]))


def with_stem(cost: RoundCost, seconds: Mapping[int, float]) -> RoundCost:
    """Add the units' ``seconds`` of computing a frozen stem before their first step."""
    costs = tuple(replace(each, stem_s=seconds.get(each.unit, 0.0)) for each in cost.clusters)
    return RoundCost(max((each.ends_s for each in costs), default=0.0), costs)


def stem_seconds(state: ClusterState, blocks: int, forward_share: float, rows: int) -> float:
    """Return the seconds in which a frozen stem of ``blocks`` blocks computes ``rows`` rows.

    The cluster's fastest device computes the rows one after another, and sends each activation back
    on its hop. ``forward_share`` is the forward pass's share of a block's time. A frozen embedding
    without blocks takes no time, like a trainable one.
    """
    laws = [device.time for device in present_devices(state)]
    row_s = min(forward_share * law.compute(blocks, 1) + law.hop(1) for law in laws)
    return rows * row_s if blocks else 0.0


def _cluster_cost(
    cluster: ClusterPlan,
    state: ClusterState,
    request: RoundRequest,
    latency: Latency,
    fading: str,
    uplink: str,
) -> ClusterCost:
    law, state = law_for(state), as_planned(state, cluster.uplink)
    if cluster.segments:
        step = _pipelined(cluster, state, request, latency, law)
    else:
        step = _replicated(state, request)
    steps, upload_s, upload_j = request.local_steps, None, 0.0
    finish_s = pipeline_s = steps * step.seconds
    if (planned := cluster.uplink) is not None:
        activation_s, model_s = _upload(planned, state, request.channels, fading)
        slowest_s = steps * step.slowest_s if uplink == "streamed" else 0.0
        m, upload_s = cluster.num_micro_batches, activation_s + model_s
        finish_s = float(streamed_s(pipeline_s, slowest_s, m, activation_s)) + model_s
        upload_j = planned.power_w * upload_s
    total_j = {name: steps * spent for name, spent in step.device_j.items()}
    return ClusterCost(
        unit=cluster.unit,
        pipeline_s=pipeline_s,
        upload_s=upload_s,
        upload_energy_j=upload_j,
        device_energy_j=total_j,
        finish_s=finish_s,
        spread=step.spread,
    )


def _pipelined(
    cluster: ClusterPlan,
    state: ClusterState,
    request: RoundRequest,
    latency: Latency,
    law: StepLaw | None,
) -> _Step:
    known = cluster.in_modes({device.name: device for device in state.devices})
    devices = tuple(known[name] for name in cluster.devices)
    problem = replace(cluster_problem(request, state, latency), devices=devices)
    partition, spread = partition_of_plan(problem, cluster), 0.0
    if law is not None and simulates(partition):
        partition, spread = simulated(partition, problem, law, cluster.schedule), law.spread
    joules = {devices[k].name: spent for k, spent in energy_j(problem, partition).items()}
    return _Step(partition.latency_s, partition.slowest_s, joules, spread)


def _replicated(state: ClusterState, request: RoundRequest) -> _Step:
    """Return a step in which each device computes all L blocks on b/K samples and sends nothing."""
    devices = present_devices(state)
    share, blocks = request.batch_size / len(devices), request.num_blocks
    seconds = max(device.time.compute(blocks, share) for device in devices)
    joules = {
        device.name: device.energy.law.compute(blocks, share)
        for device in devices
        if device.energy is not None
    }
    return _Step(seconds, 0.0, joules)


def _upload(
    planned: UplinkPlan, state: ClusterState, channels: tuple[Channel, ...], fading: str
) -> tuple[float, float]:
    """Return the upload seconds of the activations and of the model at the planned power; their sum
    is τ_n^Up (eq. 11)."""
    assert state.uplink is not None, "a verified plan has no channel for a unit without an uplink"
    uplink = replace(state.uplink, gains=(state.uplink.gains[planned.channel],))
    pair = links([uplink], [channels[planned.channel]], fading, energy="all").at(0)
    activation_s, model_s = pair.parts(np.array(planned.power_w))
    return float(activation_s.item()), float(model_s.item())
