"""A cluster's state as a problem, and a partition of it as the plan that the cluster gets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, SegmentPlan, Span, UplinkPlan
from collapipe.state import ClusterState, DeviceProfile
from optim.front_cache import solve_cached
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterProblem, ClusterSolver, Latency, Partition

T = TypeVar("T")
Front = tuple[Partition, ...]


def cluster_problem(
    request: RoundRequest, cluster: ClusterState, latency: Latency
) -> ClusterProblem:
    """Sub-1 of the devices that are there; m is at most the request's.

    Raises ``InfeasibleRoundError`` where none is.
    """
    devices = present_devices(cluster)
    if not devices:
        raise InfeasibleRoundError(
            f"each of its {len(cluster.devices)} devices is away or holds no block "
            "(max_blocks=0); federation.on_infeasible=skip waits until they are back; where memory "
            "holds no block raise it or use LoRA"
        )
    return ClusterProblem(
        devices, request.num_blocks, request.batch_size, request.num_micro_batches, latency
    )


def of_each(
    request: RoundRequest,
    make: Callable[[ClusterState], T],
    order: Sequence[int] = (),
    most: int | None = None,
) -> tuple[T | None, ...]:
    """What ``make`` makes of each cluster; None for one that it finds infeasible, which sits out.

    Parameters
    ----------
    order
        Places of all clusters, as they are asked; empty: in the units' order.
    most
        How many are needed: the others are not asked, and are None as well.

    Raises
    ------
    InfeasibleRoundError
        Where all are infeasible.
    """
    found, reasons = dict[int, T](), list[str]()
    for place in order or range(len(request.clusters)):
        if len(found) == most:
            break
        cluster = request.clusters[place]
        try:
            found[place] = make(cluster)
        except InfeasibleRoundError as error:
            reasons.append(f"unit {cluster.unit}: {error}{_of_absent(cluster)}")
    if not found:
        more = f"; {len(reasons) - 1} more units cannot either" if len(reasons) > 1 else ""
        raise InfeasibleRoundError(reasons[0] + more)
    return tuple(found.get(place) for place in range(len(request.clusters)))


def _of_absent(cluster: ClusterState) -> str:
    """What may help where some devices are away, and no other can stand in for them."""
    present, known = len(present_devices(cluster)), len(cluster.devices)
    if present in (0, known):
        return ""
    return (
        f"; {known - present} of its {known} devices are away or hold no block: "
        "federation.on_infeasible=skip waits until they are back"
    )


def fronts(
    request: RoundRequest,
    latency: Latency,
    solve: ClusterSolver,
    rng: np.random.Generator,
    order: Sequence[int] = (),
    most: int | None = None,
) -> tuple[Front, ...]:
    """All clusters' verified fronts; empty for one that cannot hold the model and sits out.

    Points have the K devices of their cluster, and latencies of all local steps of the round.
    ``order``, ``most`` and what is raised are those of ``of_each``.
    """
    found = of_each(
        request, lambda cluster: _front(request, cluster, latency, solve, rng), order, most
    )
    return tuple(front or () for front in found)


def _front(
    request: RoundRequest,
    cluster: ClusterState,
    latency: Latency,
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> Front:
    problem = cluster_problem(request, cluster, latency)
    if request.partition is None:
        front = solve_cached(problem, solve, rng)
    else:
        front = _within_limits_or_not(problem, solve, rng)
    return tuple(_of_round(point, request, cluster) for point in _at_most(request, front))


def _within_limits_or_not(
    problem: ClusterProblem, solve: ClusterSolver, rng: np.random.Generator
) -> Front:
    """As a system splits that looks at no limits; where they do not matter, nothing is marked."""
    before = rng.bit_generator.state
    try:
        return solve_cached(problem, solve, rng)
    except InfeasibleRoundError:
        # The same draws again: limits must not favour some of them.
        rng.bit_generator.state = before
        front = solve_cached(_unlimited(problem), solve, rng)
        return tuple(replace(point, over_limits=True) for point in front)


def _unlimited(problem: ClusterProblem) -> ClusterProblem:
    devices = (replace(device, max_blocks=None, energy=None) for device in problem.devices)
    return replace(problem, devices=tuple(devices))


def _of_round(point: Partition, request: RoundRequest, cluster: ClusterState) -> Partition:
    """With blocks for all K devices, none for those that are away, and all local steps' time."""
    names = (device.name for device in present_devices(cluster))
    held = dict(zip(names, point.blocks, strict=True))
    blocks = tuple(held.get(device.name, 0) for device in cluster.devices)
    return replace(point, blocks=blocks, latency_s=request.local_steps * point.latency_s)


def cluster_plan(
    request: RoundRequest,
    cluster: ClusterState,
    partition: Partition,
    uplink: UplinkPlan | None = None,
) -> ClusterPlan:
    """A partition as the plan that the cluster gets: segments in the devices' order.

    The partition's latency is that of all local steps of the round. Replicas are no segments.
    """
    return ClusterPlan(
        unit=cluster.unit,
        segments=() if partition.replicated else segment_plans(cluster.devices, partition.blocks),
        num_micro_batches=partition.num_micro_batches,
        schedule=request.schedule,
        latency_s=partition.latency_s,
        uplink=uplink,
        over_limits=partition.over_limits,
    )


def segment_plans(devices: Sequence[DeviceProfile], held: Sequence[int]) -> tuple[SegmentPlan, ...]:
    """The blocks that the devices hold, each device's after those of the ones before it."""
    segments, first = [], 0
    for device, blocks in zip(devices, held, strict=True):
        if blocks:
            segments.append(SegmentPlan(device.name, Span(first, blocks)))
            first += blocks
    return tuple(segments)


def _at_most(request: RoundRequest, front: Front) -> Front:
    """The points with no more segments than asked for."""
    most = request.num_segments
    kept = tuple(point for point in front if most is None or point.num_segments <= most)
    if not kept:
        raise InfeasibleRoundError(
            f"no plan was found with fewer than {front[0].num_segments} segments, "
            f"pipeline.num_segments={most}; raise it"
        )
    return kept
