"""Channels and powers of the units of a round."""

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, UplinkPlan
from collapipe.state import Uplink
from optim.allocation.exact import exact_allocation
from optim.cluster_plan import Front, cluster_plan
from optim.planner import RoundRequest
from optim.problem import Allocation, RoundOptions, RoundProblem
from optim.verify import verify_round


def known_uplinks(request: RoundRequest) -> tuple[Uplink, ...]:
    """Each unit's; one that is not known reaches nobody, so that its unit sits out.

    Raises ``InfeasibleRoundError`` where none is known.
    """
    num_channels = len(request.channels)
    deaf = Uplink(0.0, 0.0, 1.0, 0.0, (0.0,) * num_channels)
    uplinks = [cluster.uplink or deaf for cluster in request.clusters]
    known = [len(each.gains) == num_channels and each is not deaf for each in uplinks]
    if not any(known):
        raise InfeasibleRoundError(f"no unit told its uplink to the {num_channels} channels")
    return tuple(each if heard else deaf for each, heard in zip(uplinks, known, strict=True))


def allocated(request: RoundRequest, allocation: Allocation) -> ClusterPlan:
    """A unit's share of a solved round as its plan."""
    uplink = UplinkPlan(allocation.channel, allocation.power_w, allocation.upload_s)
    cluster = request.clusters[allocation.unit]
    return cluster_plan(request, cluster, allocation.partition, uplink)


def minimize_makespan(
    request: RoundRequest, chosen: tuple[Front, ...], fading: str
) -> tuple[ClusterPlan, ...]:
    """The channels, powers and points of the fronts with which the last unit ends first.

    Parameters
    ----------
    chosen
        Of all N clusters; empty for those that nobody chose.

    Raises
    ------
    InfeasibleRoundError
        Where no chosen unit can afford a channel. One that cannot is left out.
    """
    # With queues of 0 there is no drift: the makespan is all that counts.
    options = RoundOptions(drift_weight=1.0, interference_constant_w=0.0, fading=fading)
    problem = RoundProblem(
        chosen,
        known_uplinks(request),
        request.channels,
        (0.0,) * len(chosen),
        request.num_blocks,
        options,
    )
    solution = exact_allocation(problem)
    verify_round(solution, problem)
    return tuple(allocated(request, allocation) for allocation in solution.allocations)
