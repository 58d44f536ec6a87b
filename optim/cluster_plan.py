"""Convert a request to the solvers' problems and fronts, and their answers to plans."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import numpy as np

from collapipe.errors import InfeasibleRoundError, UnfinishedSearchError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span, UplinkPlan
from collapipe.state import Channel, ClusterState, HeadPlace, Uplink
from collapipe.step_law import StepLaw
from optim.channel import links, power_limits
from optim.kept_plan import kept_point
from optim.partition.baselines import even_blocks
from optim.partition.exact import exact_partition
from optim.planner import RoundRequest, present_devices
from optim.problem import (
    ClusterProblem,
    ClusterSolver,
    Latency,
    Partition,
    RoundOptions,
    UplinkTimes,
)
from optim.sharing.bounds import least_batch_s
from optim.sharing.exact import shared_partition
from optim.sharing.law import row_caps
from optim.simulated_plan import (
    as_measured,
    law_for,
    of_schedules,
    simulated,
    simulated_front,
    simulates,
    with_micro_batches,
)
from optim.step import in_flight, schedules
from optim.verified import solve_verified

T = TypeVar("T")
Front = tuple[Partition, ...]

_UNFINISHED = Partition((), 1, math.inf, bound_s=0.0)
_CAPACITY = 2**15  # problems: enough for two runs of 10,000 units, at a few kB each
_fronts: OrderedDict[tuple[ClusterProblem, ClusterSolver], Front] = OrderedDict()


def cluster_problem(
    request: RoundRequest,
    cluster: ClusterState,
    latency: Latency,
    activation_s: tuple[float, ...] = (0.0,),
) -> ClusterProblem:
    """Return Sub-1 of the cluster's present devices; m is at most the request's m.

    ``activation_s`` are the times that the activations of all local steps may take on the uplink.
    Raises ``InfeasibleRoundError`` if no device is present.
    """
    devices = present_devices(cluster)
    if not devices:
        raise InfeasibleRoundError(
            f"each of its {len(cluster.devices)} devices is away or holds no block "
            "(max_blocks=0); federation.on_infeasible=skip waits until they are back; if memory "
            "is too small for a block, raise it or train fewer weights (LoRA)"
        )
    steps, uplink = request.local_steps, cluster.uplink
    problem = ClusterProblem(
        devices,
        request.num_blocks,
        request.batch_size,
        request.num_micro_batches,
        latency,
        activation_s=tuple(each / steps for each in activation_s),
        head_s=uplink.head_s / steps if uplink else 0.0,
        gradient_s=uplink.gradient_s / steps if uplink else 0.0,
        in_flight=in_flight(schedules(request.schedule, measured=False)[0], len(devices)),
    )
    if request.partition == "vanilla_fl":  # all devices share the batch
        problem = problem.sharing()
    law, kept = cluster.step if cluster.real_devices else None, request.kept_by(cluster.unit)
    if law is not None:
        problem = as_measured(problem, law)
    if (known := kept or law) is None:
        return problem
    m, stages = known.num_micro_batches, law.stages if law else ()
    return with_micro_batches(problem, m, stages, request.num_segments)


def bound_points(request: RoundRequest, cluster: ClusterState, latency: Latency) -> Front:
    """Return a point without a plan for each head's place, with a lower bound, s, of all plans
    within the devices' limits; none if no device is present. The cluster must have no law of a
    whole step and no kept plan."""

    def point(head: HeadPlace | None) -> Partition:
        placed = replace(cluster, uplink=cluster.uplink and cluster.uplink.placed(head))
        bound_s = least_batch_s(cluster_problem(request, placed, latency))
        return replace(_UNFINISHED, head=head, bound_s=request.local_steps * bound_s)

    with suppress(InfeasibleRoundError):
        return tuple(map(point, head_places(cluster.uplink)))
    return ()


def known_plans(fronts: Sequence[Front]) -> tuple[Front, ...]:
    """Return the fronts without the points of searches that ended without a plan."""
    return tuple(
        tuple(point for point in front if math.isfinite(point.latency_s)) for front in fronts
    )


def of_each(
    request: RoundRequest,
    make: Callable[[ClusterState], T],
    order: Sequence[int] = (),
    most: int | None = None,
) -> tuple[T | None, ...]:
    """Apply ``make`` to each cluster. Returns None for infeasible clusters, which take no part.

    ``order`` lists indices of clusters; the default is the units' order. After ``most`` results the
    other clusters are skipped and give None as well. Raises ``InfeasibleRoundError`` if all
    clusters are infeasible.
    """
    found, reasons = dict[int, T](), list[str]()
    for place in order or range(len(request.clusters)):
        if len(found) == most:
            break
        cluster = request.clusters[place]
        try:
            found[place] = make(cluster)
        except InfeasibleRoundError as error:
            reasons.append(f"{cluster.called}: {error}")
            away = len(cluster.devices) - len(present_devices(cluster))
            if 0 < away < len(cluster.devices):  # the cluster has no replacement for them
                reasons[-1] += (
                    f"; {away} of its {len(cluster.devices)} devices are away or hold no block: "
                    "federation.on_infeasible=skip waits until they are back"
                )
    if not found:
        more = f"; {len(reasons) - 1} more units cannot either" if len(reasons) > 1 else ""
        raise InfeasibleRoundError(reasons[0] + more)
    return tuple(found.get(place) for place in range(len(request.clusters)))


def fronts(
    request: RoundRequest,
    latency: Latency,
    solve: ClusterSolver,
    rng: np.random.Generator,
    options: RoundOptions | None = None,
    order: Sequence[int] = (),
    most: int | None = None,
) -> tuple[Front, ...]:
    """Return each cluster's verified front, empty for a cluster that cannot hold the model.

    If a search ended without a plan, there is a point for each head's place that takes infinitely
    long.

    A point has blocks for all K devices of its cluster and times for all local steps of the round.
    If the place of the head is a choice, the front lists the points of each place in turn. With
    ``options`` points are the fastest for the possible uplink times of that round. ``order``,
    ``most`` and errors are as in ``of_each``.
    """
    times = dict[int, tuple[float, ...]]()
    if options:
        units = (cluster.unit for cluster in request.clusters)
        found = activation_times(uplinks_of(request), request.channels, options)
        times = dict(zip(units, found, strict=True))

    def front(cluster: ClusterState) -> Front:
        found, before = list[Partition](), rng.bit_generator.state
        for head in head_places(cluster.uplink):
            rng.bit_generator.state = before  # same draws, so that chance favours no place
            taking = (0.0,) if head == "control_unit" else times.get(cluster.unit, (0.0,))
            placed = replace(cluster, uplink=cluster.uplink and cluster.uplink.placed(head))
            try:
                points = _of_all_schedules(request, placed, latency, taking, solve, rng)
            except UnfinishedSearchError:
                places = head_places(cluster.uplink)
                unfinished[cluster.unit] = tuple(replace(_UNFINISHED, head=own) for own in places)
                raise
            found += (replace(point, head=head) for point in points)
        return tuple(found)

    unfinished = dict[int, Front]()
    pairs = zip(request.clusters, of_each(request, front, order, most), strict=True)
    return tuple(points or unfinished.get(state.unit, ()) for state, points in pairs)


def _of_all_schedules(
    request: RoundRequest,
    cluster: ClusterState,
    latency: Latency,
    activation_s: tuple[float, ...],
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> Sequence[Partition]:
    """Return the front of the request's schedule, or of all that are compared.

    Raises ``InfeasibleRoundError`` if the devices cannot hold the model with any of them.
    """
    law, found, before = law_for(cluster), dict[str, Front](), rng.bit_generator.state
    reasons = list[InfeasibleRoundError]()
    for schedule in schedules(request.schedule, law is not None):
        rng.bit_generator.state = before
        own = replace(request, schedule=schedule)
        problem = cluster_problem(own, cluster, latency, activation_s)
        try:
            points = _front(own, cluster, problem, solve, rng)
        except InfeasibleRoundError as error:
            reasons.append(error)
            continue
        found[schedule] = tuple(replace(point, schedule=schedule) for point in points)
    if not found:
        raise reasons[-1]
    if kept := request.kept_by(cluster.unit):
        same = {n: front for n, front in found.items() if _keeps(kept, front, request, cluster)}
        found = same or found
    within = {name: front for name, front in found.items() if not front[0].over_limits}
    found = within or found
    if law is None or len(found) == 1:
        return next(iter(found.values()))
    return of_schedules(found, law)


def head_places(uplink: Uplink | None) -> tuple[HeadPlace | None, ...]:
    """Return the places where a unit's head may train, from its payloads."""
    offered = uplink.payloads if uplink else ()
    return tuple(dict.fromkeys(each.head for each in offered)) or (None,)


def as_planned(cluster: ClusterState, planned: UplinkPlan | None) -> ClusterState:
    """Return the cluster with only the planned payload on its uplink, if the plan chose one."""
    if planned is None or cluster.uplink is None:
        return cluster
    chosen = cluster.uplink.payload(planned.activation, planned.upload, planned.head)
    return replace(cluster, uplink=cluster.uplink.sending(chosen))


def uplinks_of(request: RoundRequest) -> tuple[Uplink, ...]:
    """Return each cluster's uplink, or ``no_uplink`` if it is not known."""
    unknown = no_uplink(len(request.channels))
    return tuple(cluster.uplink or unknown for cluster in request.clusters)


def no_uplink(num_channels: int) -> Uplink:
    return Uplink(0.0, 0.0, 1.0, 0.0, (0.0,) * num_channels)


def activation_times(
    uplinks: Sequence[Uplink], channels: Sequence[Channel], options: RoundOptions
) -> list[tuple[float, ...]]:
    """Return each unit's possible uplink times of activations during the pipeline, s, ascending.

    0 stands for the pipeline alone. Each payload adds its time on each channel at full power; under
    drift ``paper`` units may send with less power, so any time is possible. With
    ``uplink="after"`` the only time is 0.
    """
    if options.uplink == "after" or not (uplinks and channels):
        return [(0.0,)] * len(uplinks)
    pairs = links(uplinks, channels, options.fading, options.energy)
    limits = power_limits(pairs)
    seconds, _ = pairs.parts(limits)
    found = []
    for feasible, each in zip((limits > 0).swapaxes(0, 1), seconds.swapaxes(0, 1), strict=True):
        times = tuple(np.unique(np.append(each[feasible], 0.0)).tolist())
        any_power = options.drift == "paper" and len(times) > 1
        found.append((0.0, math.inf) if any_power else times)
    return found


def _front(
    request: RoundRequest,
    cluster: ClusterState,
    problem: ClusterProblem,
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> Front:
    before = rng.bit_generator.state
    law, kept = law_for(cluster), request.kept_by(cluster.unit)
    stays = _kept_front(kept, problem, request, cluster) if kept and kept.shares else ()
    if stays:
        return stays
    if shares(solve) and not _may_share(cluster, problem, solve, kept, rng):
        solve = _single(solve)
    try:
        front = solve_cached(problem, solve, rng)
    except InfeasibleRoundError:
        if request.partition is None:
            raise
        # The framework's rule ignores limits. Draw the same numbers, so that limits do not change
        # the choice.
        rng.bit_generator.state = before
        front = solve_cached(problem.unlimited(), solve, rng)
        front = tuple(replace(point, over_limits=True) for point in front)
    if shares(solve) and law is None:
        more = _of_fewer_segments(front, problem, solve, rng)
        front = tuple(sorted((*more, *front), key=lambda point: point.num_segments))
    most = request.num_segments or request.num_blocks
    few = [point for point in front if point.num_segments <= most]
    if few and law is not None:
        few = _by_law(few, problem, law, request, solve, rng)
    if not few:
        raise InfeasibleRoundError(
            f"no plan was found with fewer than {front[0].num_segments} segments, "
            f"pipeline.num_segments={most}; raise it"
        )
    planned = tuple(_of_round(point, request, cluster) for point in few)
    if kept and not kept.shares and not _keeps(kept, planned, request, cluster):
        return _kept_front(kept, problem, request, cluster) or planned
    return planned


def _of_fewer_segments(
    front: Front, problem: ClusterProblem, solve: ClusterSolver, rng: np.random.Generator
) -> Iterator[Partition]:
    """Yield the fastest pipelines with fewer segments than some of a front's plans: they may
    suffice for a unit that is not the round's slowest."""
    most = max(point.num_segments for point in front)
    if most > 1:
        with suppress(InfeasibleRoundError):
            alone = solve_cached(problem, _single(solve), rng)
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


def _keeps(kept: ClusterPlan, front: Front, request: RoundRequest, cluster: ClusterState) -> bool:
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
    try:
        solve_cached(problem, _single(solve), rng)
    except InfeasibleRoundError:
        return True
    return False


def _by_law(
    front: list[Partition],
    problem: ClusterProblem,
    law: StepLaw,
    request: RoundRequest,
    solve: ClusterSolver,
    rng: np.random.Generator,
) -> list[Partition]:
    """Return the front by simulated times. Only the exact solvers' points are exchanged for better
    ones; other rules keep theirs."""
    if shares(solve) and all(map(simulates, front)):
        # the first round chooses m, too
        most = request.num_micro_batches
        problem = replace(problem, min_micro_batches=1, max_micro_batches=most)
        for m in _sizes(law, most):
            of_m = replace(problem, min_micro_batches=m, max_micro_batches=m)
            for each in (solve, _single(solve)):
                with suppress(InfeasibleRoundError):
                    front += filter(simulates, solve_cached(of_m, each, rng))
    if shares(solve) or _rule(solve) is exact_partition:
        limits = request.num_segments, shares(solve)
        return simulated_front(front, problem, law, request.schedule, *limits)
    known = map(simulates, front)
    return [
        simulated(each, problem, law, request.schedule) if fits else each
        for each, fits in zip(front, known, strict=True)
    ]


def _sizes(law: StepLaw, most: int) -> list[int]:
    """Return the numbers of micro-batches that are compared: powers of 2, and the last one."""
    powers = {2**power for power in range(most.bit_length())}
    return sorted(m for m in powers | {law.num_micro_batches} if m <= most)


def _rule(solve: ClusterSolver) -> object:
    """Return the solver's function without its options."""
    return getattr(solve, "func", solve)


def shares(solve: ClusterSolver) -> bool:
    """Whether the solver plans shared stages, and proves that they are the fastest."""
    return _rule(solve) is shared_partition


@cache  # the same object for the same solver, because ``solve_cached`` compares solvers
def _single(solve: ClusterSolver) -> ClusterSolver:
    """Return the exact solver of pipelines of single devices, with the options of ``solve``."""
    return partial(exact_partition, **getattr(solve, "keywords", {}))


def fastest(front: Front) -> Partition:
    """Return the point with the fastest pipeline, without the uplink's time."""
    return min(front, key=lambda point: point.latency_s)


def solve_cached(problem: ClusterProblem, solver: ClusterSolver, rng: np.random.Generator) -> Front:
    """Return the solver's verified front, from the cache if an equal problem was solved.

    A front is cached only if another call would find the same front: not if the solver drew from
    ``rng``. Limits of searches count nodes, not seconds. Raises like the solver and
    ``verify_cluster``.
    """
    key = problem, solver
    if key in _fronts:
        _fronts.move_to_end(key)
        return _fronts[key]
    before = rng.bit_generator.state
    solution = solve_verified(problem, solver, rng)
    front, bound_s = solution.front, solution.certificate.lower_bound
    if not solution.complete:
        front = tuple(replace(point, bound_s=bound_s) for point in front)
    if rng.bit_generator.state == before:
        _fronts[key] = front
        if len(_fronts) > _CAPACITY:
            _fronts.popitem(last=False)
    return front


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
