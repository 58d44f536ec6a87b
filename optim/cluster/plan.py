"""Turn a point of a cluster's front into its plan."""

from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span, UplinkPlan
from collapipe.state import ClusterState
from optim.partition.baselines import even_blocks
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterProblem, Partition
from optim.sharing.law import row_caps


def cluster_plan(
    request: RoundRequest,
    cluster: ClusterState,
    partition: Partition,
    uplink: UplinkPlan | None = None,
) -> ClusterPlan:
    """Turn a partition into the cluster's plan: segments in pipeline order.

    ``partition.latency_s`` covers all local steps of the round. Replicas (VanillaFL) have no
    segments if devices are simulated; real devices share one.
    """
    segments, over_limits = partition.segments(cluster.devices), partition.over_limits
    if partition.replicated and cluster.real_devices:
        segments = (_replicas(request, cluster),)
        over_limits = over_limits or not _hold_gradients(request, cluster, segments[0])
    return ClusterPlan(
        unit=cluster.unit,
        segments=segments,
        num_micro_batches=partition.num_micro_batches,
        schedule=partition.schedule or request.schedule,
        latency_s=partition.latency_s,
        uplink=uplink,
        over_limits=over_limits,
    )


def _replicas(request: RoundRequest, cluster: ClusterState) -> SegmentPlan:
    """Return the whole encoder on each present device, with b/K rows."""
    names = [device.name for device in present_devices(cluster)]
    rows = even_blocks(request.batch_size, len(names))
    used = [Share(*pair) for pair in zip(names, rows, strict=True) if pair[1]]
    shares = tuple(used) if len(used) > 1 else ()
    return SegmentPlan(used[0].device, Span(0, request.num_blocks), shares)


def _hold_gradients(request: RoundRequest, cluster: ClusterState, replicas: SegmentPlan) -> bool:
    """Whether replicas on real devices, which add their gradients, fit their memory."""
    devices, b = present_devices(cluster), request.batch_size
    problem = ClusterProblem(devices, request.num_blocks, b, 1, "overlap").sharing()
    rows = dict(zip(replicas.devices, replicas.rows_of_devices, strict=False))  # none if alone
    held = ((row_caps(problem, each)[-1, 0, -1], each.name) for each in problem.devices)
    return all(most >= rows.get(name, 0) for most, name in held)
