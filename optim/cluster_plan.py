"""A cluster's state as a problem, and a partition of it as the plan that the cluster gets."""

from collections.abc import Callable
from dataclasses import replace

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, SegmentPlan, Span, UplinkPlan
from collapipe.state import ClusterState
from optim.partition import exact_partition
from optim.planner import RoundRequest
from optim.problem import ClusterProblem, ClusterSolution, Latency, Partition
from optim.verify import verify_cluster

Solve = Callable[[ClusterProblem], ClusterSolution]


def _problem(request: RoundRequest, cluster: ClusterState, latency: Latency) -> ClusterProblem:
    """Sub-1 of a cluster; m is at most the request's."""
    return ClusterProblem(
        cluster.devices,
        request.num_blocks,
        request.batch_size,
        request.num_micro_batches,
        latency,
    )


def cluster_front(
    request: RoundRequest, cluster: ClusterState, latency: Latency, solve: Solve
) -> tuple[Partition, ...]:
    """The verified front of a cluster; its latencies are those of all local steps of the round.

    Raises ``InfeasibleRoundError``.
    """
    problem = _problem(request, cluster, latency)
    solution = solve(problem)
    verify_cluster(solution, problem)
    return tuple(
        replace(point, latency_s=request.local_steps * point.latency_s)
        for point in _at_most(request, solution.front)
    )


def fastest_partition(request: RoundRequest, cluster: ClusterState, latency: Latency) -> Partition:
    """The fastest partition of a cluster, for all local steps of the round, verified.

    Raises ``InfeasibleRoundError``.
    """
    return cluster_front(request, cluster, latency, exact_partition)[-1]


def cluster_plan(
    request: RoundRequest,
    cluster: ClusterState,
    partition: Partition,
    uplink: UplinkPlan | None = None,
) -> ClusterPlan:
    """A partition as the plan that the cluster gets: segments in the devices' order.

    The partition's latency is that of all local steps of the round.
    """
    segments, first = [], 0
    for device, blocks in zip(cluster.devices, partition.blocks, strict=True):
        if blocks:
            segments.append(SegmentPlan(device.name, Span(first, blocks)))
            first += blocks
    return ClusterPlan(
        cluster.unit,
        tuple(segments),
        partition.num_micro_batches,
        request.schedule,
        partition.latency_s,
        uplink,
    )


def _at_most(request: RoundRequest, front: tuple[Partition, ...]) -> tuple[Partition, ...]:
    """The points with no more segments than asked for."""
    most = request.num_segments
    kept = tuple(point for point in front if most is None or point.num_segments <= most)
    if not kept:
        raise InfeasibleRoundError(
            f"the model needs {front[0].num_segments} devices, pipeline.num_segments={most}; "
            "raise it"
        )
    return kept
