"""Convert a cluster's state and uplink to the problem of its solvers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import UplinkPlan
from collapipe.state import Channel, ClusterState, HeadPlace, Uplink
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterProblem, Latency
from optim.round.channel import links, power_limits
from optim.round.problem import RoundOptions
from optim.simulated_plan import as_measured, with_micro_batches
from optim.step import in_flight, schedules


def cluster_problem(
    request: RoundRequest,
    cluster: ClusterState,
    latency: Latency,
    activation_s: tuple[float, ...] = (0.0,),
) -> ClusterProblem:
    """Return Sub-1 of the cluster's present devices; m is at most the request's m.

    ``activation_s`` are the times that the activations of all local steps may take on the uplink.
    Raises ``InfeasibleRoundError`` if no device is present.
    """
    devices = present_devices(cluster)
    if not devices:
        raise InfeasibleRoundError(
            f"each of its {len(cluster.devices)} devices is away or holds no block "
            "(max_blocks=0); federation.on_infeasible=skip waits until they are back; if memory "
            "is too small for a block, raise it or train fewer weights (LoRA)"
        )
    steps, uplink = request.local_steps, cluster.uplink
    problem = ClusterProblem(
        devices,
        request.num_blocks,
        request.batch_size,
        request.num_micro_batches,
        latency,
        activation_s=tuple(each / steps for each in activation_s),
        head_s=uplink.head_s / steps if uplink else 0.0,
        gradient_s=uplink.gradient_s / steps if uplink else 0.0,
        in_flight=in_flight(schedules(request.schedule, measured=False)[0], len(devices)),
    )
    if request.partition == "vanilla_fl":  # all devices share the batch
        problem = problem.sharing()
    law, kept = cluster.step if cluster.real_devices else None, request.kept_by(cluster.unit)
    if law is not None:
        problem = as_measured(problem, law)
    if kept is None:
        return problem
    stages = law.stages if law else ()
    return with_micro_batches(problem, kept.num_micro_batches, stages, request.num_segments)


def head_places(uplink: Uplink | None) -> tuple[HeadPlace | None, ...]:
    """Return the places where a unit's head may train, from its payloads."""
    offered = uplink.payloads if uplink else ()
    return tuple(dict.fromkeys(each.head for each in offered)) or (None,)


def as_planned(cluster: ClusterState, planned: UplinkPlan | None) -> ClusterState:
    """Return the cluster with only the planned payload on its uplink, if the plan chose one."""
    if planned is None or cluster.uplink is None:
        return cluster
    chosen = cluster.uplink.payload(planned.activation, planned.upload, planned.head)
    return replace(cluster, uplink=cluster.uplink.sending(chosen))


def uplinks_of(request: RoundRequest) -> tuple[Uplink, ...]:
    """Return each cluster's uplink, or ``no_uplink`` if it is not known."""
    unknown = no_uplink(len(request.channels))
    return tuple(cluster.uplink or unknown for cluster in request.clusters)


def no_uplink(num_channels: int) -> Uplink:
    return Uplink(0.0, 0.0, 1.0, 0.0, (0.0,) * num_channels)


def activation_times(
    uplinks: Sequence[Uplink], channels: Sequence[Channel], options: RoundOptions
) -> list[tuple[float, ...]]:
    """Return each unit's possible uplink times of activations during the pipeline, s, ascending.

    0 stands for the pipeline alone. Each payload adds its time on each channel at full power; under
    drift ``paper`` units may send with less power, so any time is possible. With
    ``uplink="after"`` the only time is 0.
    """
    if options.uplink == "after" or not (uplinks and channels):
        return [(0.0,)] * len(uplinks)
    pairs = links(uplinks, channels, options.fading, options.energy)
    limits = power_limits(pairs)
    seconds, _ = pairs.parts(limits)
    found = []
    for feasible, each in zip((limits > 0).swapaxes(0, 1), seconds.swapaxes(0, 1), strict=True):
        times = tuple(np.unique(np.append(each[feasible], 0.0)).tolist())
        any_power = options.drift == "paper" and len(times) > 1
        found.append((0.0, math.inf) if any_power else times)
    return found
