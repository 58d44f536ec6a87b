"""The joint problem of a round, and the fronts that it needs."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, UplinkPlan
from optim.cluster.cache import Front, shares
from optim.cluster.fronts import bound_points, fronts, known_plans
from optim.cluster.plan import cluster_plan
from optim.cluster.problem import no_uplink, uplinks_of
from optim.planner import RoundRequest
from optim.problem import ClusterSolver, Latency, Partition
from optim.round.problem import Allocation, RoundOptions, RoundProblem, RoundSolution, RoundSolver
from optim.simulated_plan import law_for
from optim.verify import verify_round

_SMALL_PART = 0.01  # of the round's time: to search all other units could not save more
Planned = tuple[RoundProblem, RoundSolution, tuple[ClusterPlan, ...]]
"""The joint problem of some fronts, its verified solution, and the scheduled plans."""


def plan_jointly(
    request: RoundRequest,
    latency: Latency,
    solve: ClusterSolver,
    rng: np.random.Generator,
    options: RoundOptions,
    allocate: RoundSolver,
) -> Planned:
    """Plan the round with the fastest plans of each unit that ``solve`` finds.

    A search of shared stages takes long. So first only units are searched that the round would
    schedule if all others were as fast as a lower bound, until it schedules no other ones. All are
    searched if what is left open could shorten the round by more than 1 %.
    Raises ``InfeasibleRoundError`` if no unit can take part.
    """
    queues = request.queues, request.error_queues or (0.0,) * len(request.queues)

    def search(some: RoundRequest) -> tuple[Front, ...]:
        return fronts(some, latency, solve, rng, options)

    def scheduled(found: Sequence[Front]) -> set[int]:
        problem = _joint_problem(request, _loose(request, found), options, *queues)
        return {each.unit for each in allocate(problem).allocations}

    def planned(found: tuple[Front, ...]) -> Planned:
        return solve_round(request, found, queues[0], options, allocate, queues[1])

    if shares(solve) and _bounds_hold(request):
        with suppress(InfeasibleRoundError):  # the fronts of all units say why
            bounds = [bound_points(request, each, latency) for each in request.clusters]
            found = _of_used_units(request, bounds, search, scheduled)
            problem, solution, plans = planned(found)
            time_s = max(each.finish_s for each in solution.allocations)
            gap = solution.certificate.objective - solution.certificate.lower_bound
            if gap <= _SMALL_PART * options.drift_weight * time_s:
                return problem, solution, plans
    return planned(search(request))


def _bounds_hold(request: RoundRequest) -> bool:
    """Whether ``bound_points`` are bounds: units plan within their limits, by their devices' laws
    alone. False if no device shares stages, as no search takes long."""
    may = any(device.sharing for each in request.clusters for device in each.devices)
    return may and request.partition is None and not any(map(law_for, request.clusters))


def _of_used_units(
    request: RoundRequest,
    bounds: Sequence[Front],
    search: Callable[[RoundRequest], tuple[Front, ...]],
    scheduled: Callable[[Sequence[Front]], set[int]],
) -> tuple[Front, ...]:
    """Return the searched fronts of the units that are ``scheduled`` if all others are as fast as
    their ``bounds``, and these bounds of all others."""
    found, left = list(bounds), set(range(len(bounds)))
    while used := sorted(scheduled(found) & left):
        left -= set(used)
        some = replace(request, clusters=tuple(request.clusters[unit] for unit in used))
        try:
            of_some = search(some)
        except InfeasibleRoundError:  # none of these units can hold the model
            of_some = ((),) * len(used)
        for unit, front in zip(used, of_some, strict=True):
            found[unit] = front
    return tuple(found)


def solve_round(
    request: RoundRequest,
    fronts: tuple[Front, ...],
    queues: tuple[float, ...],
    options: RoundOptions,
    solve: RoundSolver,
    error_queues: tuple[float, ...] = (),
) -> Planned:
    """Return the joint problem of these fronts, its verified solution, and the scheduled plans.

    A unit without a known uplink is not scheduled. Raises ``InfeasibleRoundError`` if no unit has
    one.
    """
    known, loose = known_plans(fronts), _loose(request, fronts)
    problem = _joint_problem(request, known, options, queues, error_queues)
    solution = solve(problem)
    verify_round(solution, problem)
    if loose != known:
        relaxed, found = solve(replace(problem, fronts=loose)), solution.certificate
        # more units cost more, but there may be no plans for more
        more = len(relaxed.allocations) > len(solution.allocations)
        bound = 0.0 if more else min(relaxed.certificate.lower_bound, found.objective)
        solution = replace(solution, certificate=replace(found, lower_bound=bound))
    plans = (
        cluster_plan(request, request.clusters[each.unit], each.partition, _uplink_plan(each))
        for each in solution.allocations
    )
    return problem, solution, tuple(plans)


def _joint_problem(
    request: RoundRequest,
    fronts: tuple[Front, ...],
    options: RoundOptions,
    queues: tuple[float, ...],
    error_queues: tuple[float, ...],
) -> RoundProblem:
    channels, uplinks = request.channels, uplinks_of(request)
    if not channels or all(each == no_uplink(len(channels)) for each in uplinks):
        raise InfeasibleRoundError(f"no uplink to a channel (channels: {len(channels)}); add them")
    names = tuple(cluster.called for cluster in request.clusters)
    return RoundProblem(
        fronts, uplinks, channels, queues, request.num_blocks, options, error_queues, names
    )


def _loose(request: RoundRequest, fronts: Sequence[Front]) -> tuple[Front, ...]:
    """Return fronts for which no round is slower than for all possible plans."""
    return tuple(_with_bounds(front, request.num_micro_batches) for front in fronts)


def _with_bounds(front: Front, most: int) -> Front:
    """Return the front with a point of one segment for each head's place whose search left plans
    open. It is at least as fast, for all uplink times, as all plans with at most ``most``
    micro-batches."""
    bounds = {point.head: point.bound_s for point in front if math.isfinite(point.bound_s)}
    # the sum of a plan's stages is at least 1/m of its time
    fastest = (Partition((1,), most, s, s / most, head=head) for head, s in bounds.items())
    return (*known_plans([front])[0], *fastest)


def _uplink_plan(given: Allocation) -> UplinkPlan:
    sent = given.payload
    chosen = sent.choice if sent else ()
    return UplinkPlan(given.channel, given.power_w, given.upload_s, given.finish_s, *chosen)
