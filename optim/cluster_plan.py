"""A cluster's state as a problem, and a partition of it as the plan that the cluster gets."""

from collections.abc import Callable
from dataclasses import replace

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, SegmentPlan, Span, UplinkPlan
from collapipe.state import ClusterState
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


def _front(
    request: RoundRequest, cluster: ClusterState, latency: Latency, solve: Solve
) -> tuple[Partition, ...]:
    """The verified front of a cluster; its latencies are those of all local steps of the round.

    Raises ``InfeasibleRoundError``.
    """
    problem = _problem(request, cluster, latency)
    try:
        solution = solve(problem)
        verify_cluster(solution, problem)
        kept = _at_most(request, solution.front)
    except InfeasibleRoundError as error:
        raise InfeasibleRoundError(f"unit {cluster.unit}: {error}") from error
    return tuple(replace(point, latency_s=request.local_steps * point.latency_s) for point in kept)


def fronts(
    request: RoundRequest, latency: Latency, solve: Solve
) -> tuple[tuple[Partition, ...], ...]:
    """All clusters' fronts; empty for one that cannot hold the model and sits out.

    Raises ``InfeasibleRoundError`` where none can.
    """
    found, reasons = list[tuple[Partition, ...]](), list[str]()
    for cluster in request.clusters:
        try:
            found.append(_front(request, cluster, latency, solve))
        except InfeasibleRoundError as error:
            found.append(())
            reasons.append(str(error))
    if not any(found):
        more = f"; {len(reasons) - 1} more units cannot either" if len(reasons) > 1 else ""
        raise InfeasibleRoundError(reasons[0] + more)
    return tuple(found)


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
            f"no plan was found with fewer than {front[0].num_segments} segments, "
            f"pipeline.num_segments={most}; raise it"
        )
    return kept
