"""Channels and powers of the units of a round."""

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, UplinkPlan
from collapipe.state import Uplink
from optim.allocation.exact import exact_allocation
from optim.cluster_plan import Front, cluster_plan
from optim.planner import RoundRequest
from optim.problem import RoundOptions, RoundProblem, RoundSolution, RoundSolver
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


def solve_round(
    request: RoundRequest,
    fronts: tuple[Front, ...],
    queues: tuple[float, ...],
    options: RoundOptions,
    solve: RoundSolver,
) -> tuple[RoundProblem, RoundSolution, tuple[ClusterPlan, ...]]:
    """The joint round of these fronts, its verified answer, and the scheduled units' plans."""
    uplinks, channels = known_uplinks(request), request.channels
    problem = RoundProblem(fronts, uplinks, channels, queues, request.num_blocks, options)
    solution = solve(problem)
    verify_round(solution, problem)
    plans = (
        cluster_plan(
            request,
            request.clusters[each.unit],
            each.partition,
            UplinkPlan(each.channel, each.power_w, each.upload_s),
        )
        for each in solution.allocations
    )
    return problem, solution, tuple(plans)


def minimize_makespan(
    request: RoundRequest, chosen: tuple[Front, ...], fading: str
) -> tuple[ClusterPlan, ...]:
    """The channels, powers and points of the fronts with which the last unit ends first.

    ``chosen`` are the fronts of all N clusters, empty for those that nobody chose. A unit that can
    afford no channel is left out. Raises ``InfeasibleRoundError`` where that is each of them.
    """
    # With queues of 0 there is no drift: the makespan is all that counts.
    options = RoundOptions(drift_weight=1.0, interference_constant_w=0.0, fading=fading)
    return solve_round(request, chosen, (0.0,) * len(chosen), options, exact_allocation)[2]
