"""The front of a cluster with one schedule: searched, kept from an earlier round, or simulated."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan
from collapipe.state import ClusterState
from collapipe.step_law import StepLaw
from optim.cluster.cache import Front, is_exact, shares, single, solve_cached
from optim.cluster.kept import kept_point
from optim.cluster.plan import cluster_plan
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterProblem, ClusterSolver, Partition, UplinkTimes
from optim.simulated_plan import (
    law_for,
    simulated,
    simulated_front,
    simulates,
    with_micro_batches,
)


def front_of(
    request: RoundRequest,
    cluster: ClusterState,
    problem: ClusterProblem,
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> Front:
    """Return the front of the request's schedule for this problem, with the times of a round.

    Raises ``InfeasibleRoundError`` if the devices cannot hold the model.
    """
    law, kept = law_for(cluster), request.kept_by(cluster.unit)
    stays = _kept_front(kept, problem, request, cluster) if kept and kept.shares else ()
    if stays:
        return stays
    if shares(solve) and not _may_share(cluster, problem, solve, kept, rng):
        solve = single(solve)
    if law is None:
        found = _by_closed_law(problem, request, solve, rng)
    else:
        found = _by_measured_law(problem, law, request, kept is None, solve, rng)
    planned = tuple(_of_round(point, request, cluster) for point in found)
    if kept and not kept.shares and not keeps(kept, planned, request, cluster):
        return _kept_front(kept, problem, request, cluster) or planned
    return planned


def _by_closed_law(
    problem: ClusterProblem, request: RoundRequest, solve: ClusterSolver, rng: np.random.Generator
) -> Sequence[Partition]:
    front = _solved(problem, request, solve, rng)
    if shares(solve):
        more = _of_fewer_segments(front, problem, solve, rng)
        front = tuple(sorted((*more, *front), key=lambda point: point.num_segments))
    return _with_few_segments(front, request)


def _by_measured_law(
    problem: ClusterProblem,
    law: StepLaw,
    request: RoundRequest,
    first: bool,
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> Sequence[Partition]:
    """Return the front by simulated times. Only the exact solvers' points are exchanged for better
    ones, and in a run's ``first`` round for those with another m; other rules keep theirs."""
    exact, most = shares(solve) or is_exact(solve), request.num_segments
    if exact and first:
        problem = with_micro_batches(problem, law.num_micro_batches, law.stages, most)
    front = _with_few_segments(_solved(problem, request, solve, rng), request)
    if not exact:
        return [
            simulated(each, problem, law, request.schedule) if simulates(each) else each
            for each in front
        ]
    if first and all(map(simulates, front)):
        problem = replace(problem, min_micro_batches=1, max_micro_batches=request.num_micro_batches)
        front += _of_all_sizes(problem, law, solve, rng)
    return simulated_front(front, problem, law, request.schedule, most, shares(solve))


def _of_all_sizes(
    problem: ClusterProblem, law: StepLaw, solve: ClusterSolver, rng: np.random.Generator
) -> Iterator[Partition]:
    """Yield the fronts of m that is a power of 2 or the law's."""
    most = problem.max_micro_batches
    powers = {2**power for power in range(most.bit_length())}
    for m in sorted(m for m in powers | {law.num_micro_batches} if m <= most):
        of_m = replace(problem, min_micro_batches=m, max_micro_batches=m)
        for each in (solve, single(solve)):
            with suppress(InfeasibleRoundError):
                yield from filter(simulates, solve_cached(of_m, each, rng))


def _solved(
    problem: ClusterProblem, request: RoundRequest, solve: ClusterSolver, rng: np.random.Generator
) -> Front:
    """Return the solver's front. A framework's rule ignores limits if it exceeds them; it then
    draws the same numbers, so that limits do not change its choice."""
    before = rng.bit_generator.state
    try:
        return solve_cached(problem, solve, rng)
    except InfeasibleRoundError:
        if request.partition is None:
            raise
        rng.bit_generator.state = before
        front = solve_cached(problem.unlimited(), solve, rng)
        return tuple(replace(point, over_limits=True) for point in front)


def _with_few_segments(front: Front, request: RoundRequest) -> list[Partition]:
    """Return the points with at most the request's segments. Raises ``InfeasibleRoundError`` if
    there are none."""
    most = request.num_segments or request.num_blocks
    few = [point for point in front if point.num_segments <= most]
    if not few:
        raise InfeasibleRoundError(
            f"no plan was found with fewer than {front[0].num_segments} segments, "
            f"pipeline.num_segments={most}; raise it"
        )
    return few


def _of_fewer_segments(
    front: Front, problem: ClusterProblem, solve: ClusterSolver, rng: np.random.Generator
) -> Iterator[Partition]:
    """Yield the fastest pipelines with fewer segments than some of a front's plans: they may
    suffice for a unit that is not the round's slowest."""
    most = max(point.num_segments for point in front)
    if most > 1:
        with suppress(InfeasibleRoundError):
            alone = solve_cached(problem, single(solve), rng)
            few = (point for point in alone if point.num_segments < most)
            yield from (replace(point, bound_s=front[0].bound_s) for point in few)


def _kept_front(
    kept: ClusterPlan, problem: ClusterProblem, request: RoundRequest, cluster: ClusterState
) -> Front:
    """Return the fastest plan with the shares of the ``kept`` one, if devices can hold them."""
    over_limits = kept.over_limits and request.partition is not None
    problem = problem.unlimited() if over_limits else problem
    point = kept_point(kept, problem, law_for(cluster), request.schedule)
    if point is None:
        return ()
    return (_of_round(replace(point, over_limits=over_limits), request, cluster),)


def keeps(kept: ClusterPlan, front: Front, request: RoundRequest, cluster: ClusterState) -> bool:
    """Whether the front's plans give the same bits as the ``kept`` one."""
    plans = (cluster_plan(request, cluster, point) for point in front)
    return all(plan.order_of_sums == kept.order_of_sums for plan in plans)


def _may_share(
    cluster: ClusterState,
    problem: ClusterProblem,
    solve: ClusterSolver,
    kept: ClusterPlan | None,
    rng: np.random.Generator,
) -> bool:
    """Whether its devices may share stages. Real ones without measured times, or after rounds
    without shares, may only if no pipeline of single devices fits."""
    if all(device.sharing is None for device in problem.devices):
        return False
    if not cluster.real_devices or (cluster.step is not None and kept is None):
        return True
    with suppress(InfeasibleRoundError):
        solve_cached(problem, single(solve), rng)
        return False
    return True


def _of_round(point: Partition, request: RoundRequest, cluster: ClusterState) -> Partition:
    """Extend the blocks to all K devices, with 0 for absent ones, and the times to all local
    steps."""
    present = {device.name for device in present_devices(cluster)}
    used = [k for k, device in enumerate(cluster.devices) if device.name in present]
    steps, (first, last) = request.local_steps, point.fastest_s
    return replace(
        point.among(used, len(cluster.devices)),
        latency_s=steps * point.latency_s,
        slowest_s=steps * point.slowest_s,
        bound_s=steps * point.bound_s,
        fastest_s=UplinkTimes(steps * first, steps * last),
    )
