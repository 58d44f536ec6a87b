"""Verify a round's plan of any strategy against the units' capabilities."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from collapipe.errors import PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.state import ClusterState
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterProblem, Partition, stages_of_plan
from optim.step import in_flight, schedules
from optim.verify.cluster import check_point
from optim.verify.tolerance import exceeds, violation


def verify_plan(plan: RoundPlan, request: RoundRequest) -> None:
    """Check participants, channels and blocks of a plan: C1 to C3, C5 to C7 and C9', not C8.

    The plan has queues for all units (C10) or none. Its times and queues must be finite and not
    negative, but are not computed again. A plan marked ``over_limits`` is exempt from the memory
    and energy caps (C7, C9'); only a framework that prescribes a partition may use it, and devices
    that are away (``max_blocks=0``) get no blocks even then.

    Raises ``PlanViolationError`` with the unit, the constraint that fails, and the numbers.
    """
    if plan.round != request.round:
        raise violation("round", f"{plan.round}, the request is of round {request.round}")
    states = {state.unit: state for state in request.clusters}
    for name in ("gammas", "queues", "idle_queues", "error_queues"):
        count = len(getattr(plan, name))
        if count not in (0, len(states)):
            raise violation("C10", f"{count} {name} of {len(states)} units")
    for name, figure in _figures(plan):
        if not (math.isfinite(figure) and figure >= 0):
            raise violation(name, f"{figure}, must be finite and not negative")
    _check_once("units", [cluster.unit for cluster in plan.clusters], len(states))
    uplinks = [cluster.uplink.channel for cluster in plan.clusters if cluster.uplink is not None]
    _check_once("channels", uplinks, len(request.channels))
    for cluster in plan.clusters:
        if cluster.unit not in states:
            raise violation("C3", f"unit {cluster.unit}: the request has units {sorted(states)}")
        state = states[cluster.unit]
        try:
            if cluster.uplink is not None:
                _check_uplink(cluster.uplink, state, len(request.channels))
            if cluster.over_limits and request.partition is None:
                raise violation("C7", "a plan over limits, though no framework prescribes a split")
            _check_blocks(cluster, state, request)
        except PlanViolationError as error:
            raise PlanViolationError(f"{state.called}: {error}") from error


def _figures(plan: RoundPlan) -> Iterator[tuple[str, float]]:
    """Yield the queues and the clusters' times, each with its name."""
    for name in ("queues", "idle_queues", "error_queues"):
        yield from ((name, each) for each in getattr(plan, name))
    for cluster in plan.clusters:
        if cluster.latency_s is not None:
            yield f"latency_s of unit {cluster.unit}", cluster.latency_s
        if cluster.uplink is not None:
            for name in ("upload_s", "finish_s"):
                yield f"{name} of unit {cluster.unit}", getattr(cluster.uplink, name)


def _check_once(what: str, used: list[int], most: int) -> None:
    twice = [number for number, times in Counter(used).items() if times > 1]
    if twice or len(used) > most:
        raise violation("C5", f"{what} {used}: each of {most} may be used once")


def _check_uplink(uplink: UplinkPlan, state: ClusterState, num_channels: int) -> None:
    gains = state.uplink.gains if state.uplink is not None else ()
    if not 0 <= uplink.channel < min(num_channels, len(gains)):
        raise violation(
            "C3",
            f"channel {uplink.channel} of {num_channels}; the unit reported {len(gains)} gains",
        )
    assert state.uplink is not None  # it has gains
    sent = uplink.activation, uplink.upload, uplink.head
    if any(sent) and state.uplink.payload(*sent) is None:
        raise violation(
            "payload",
            f"activations in {sent[0]}, upload in {sent[1]}, head on {sent[2]}: not offered",
        )
    limit_w = state.uplink.max_power_w
    if not uplink.power_w >= 0 or exceeds(uplink.power_w, limit_w):
        raise violation("C6", f"{uplink.power_w:.12g} W of {limit_w:.12g} W")
    bits = state.uplink.sending(state.uplink.payload(*sent))
    if not uplink.power_w * gains[uplink.channel] and bits.model_bits + bits.activation_bits:
        raise violation("C6", f"channel {uplink.channel}: without power or gain nothing is sent")


def _check_blocks(cluster: ClusterPlan, state: ClusterState, request: RoundRequest) -> None:
    """Raise ``PlanViolationError`` if segments exceed the devices' caps."""
    names = [device.name for device in state.devices]
    devices = tuple(cluster.in_modes({each.name: each for each in state.devices}).values())
    times = Counter(cluster.devices)
    invalid = [name for name, count in times.items() if count > 1 or name not in names]
    if invalid:
        raise violation(
            "C2", f"segments on {', '.join(invalid)}; the devices are {', '.join(names)}"
        )
    held = {name: segment.span.blocks for segment in cluster.segments for name in segment.devices}
    replicated = request.partition == "vanilla_fl" and not cluster.segments
    if replicated:
        devices = tuple(device for device in devices if device.max_blocks != 0)
        held = dict.fromkeys(names, request.num_blocks)
        if not devices:
            raise violation("C2", f"replicas on {len(names)} devices, all of them away")
    blocks = tuple(held.get(device.name, 0) for device in devices)
    if cluster.over_limits:
        devices = tuple(
            replace(each.unlimited(), max_blocks=0 if each.max_blocks == 0 else None)
            for each in devices
        )
    if cluster.schedule not in (allowed := schedules(request.schedule, measured=True)):
        raise violation("schedule", f"{cluster.schedule[:20]}, must be {' or '.join(allowed)}")
    b = request.batch_size
    kept = in_flight(cluster.schedule, len(present_devices(state)) or 1)
    problem = ClusterProblem(devices, request.num_blocks, b, b, "overlap", in_flight=kept)
    if request.partition == "vanilla_fl":  # all devices share the batch
        problem = problem.sharing()
    rows = math.ceil(b / cluster.num_micro_batches)
    stages = stages_of_plan(cluster, devices, rows)
    point = Partition(blocks, cluster.num_micro_batches, 0.0, replicated=replicated, stages=stages)
    check_point(point, problem)
