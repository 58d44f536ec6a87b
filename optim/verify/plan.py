"""A round's plan, whoever made it: what the units are told keeps the caps of what they have."""

from collections import Counter

from collapipe.errors import PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import ClusterState
from optim.planner import RoundRequest
from optim.problem import ClusterProblem, Partition
from optim.verify.cluster import check_point
from optim.verify.judgement import violation


def verify_plan(plan: RoundPlan, request: RoundRequest) -> None:
    """Check who takes part, on which channel, with which blocks: C1, C2, C5, C7 and C9'.

    Raises
    ------
    PlanViolationError
        With the unit, the constraint that fails, and the numbers.
    """
    states = {state.unit: state for state in request.clusters}
    _check_once("units", [cluster.unit for cluster in plan.clusters], len(states))
    uplinks = [cluster.uplink.channel for cluster in plan.clusters if cluster.uplink is not None]
    _check_once("channels", uplinks, len(request.channels))
    for cluster in plan.clusters:
        if cluster.unit not in states:
            raise violation("C3", f"unit {cluster.unit} takes part, known are {sorted(states)}")
        try:
            _check_cluster(cluster, states[cluster.unit], request)
        except PlanViolationError as error:
            raise PlanViolationError(f"unit {cluster.unit}: {error}") from error


def _check_once(what: str, used: list[int], most: int) -> None:
    twice = [number for number, times in Counter(used).items() if times > 1]
    if twice or len(used) > most:
        raise violation("C5", f"{what} {used}, of {most}; each is used once at most")


def _check_cluster(cluster: ClusterPlan, state: ClusterState, request: RoundRequest) -> None:
    held = Counter(segment.device for segment in cluster.segments)
    names = [device.name for device in state.devices]
    odd = [name for name, times in held.items() if times > 1 or name not in names]
    if odd:
        raise violation("C2", f"segments on {', '.join(odd)}; the devices are {', '.join(names)}")
    blocks = {segment.device: segment.span.blocks for segment in cluster.segments}
    partition = Partition(
        tuple(blocks.get(name, 0) for name in names), cluster.num_micro_batches, 0.0
    )
    check_point(
        partition,
        ClusterProblem(
            state.devices, request.num_blocks, request.batch_size, request.batch_size, "overlap"
        ),
    )
