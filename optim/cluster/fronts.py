"""The fronts of all clusters of a round, over all schedules and places of the head."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np

from collapipe.errors import InfeasibleRoundError, UnfinishedSearchError
from collapipe.state import ClusterState, HeadPlace
from optim.cluster.cache import Front
from optim.cluster.front import front_of, keeps
from optim.cluster.problem import activation_times, cluster_problem, head_places, uplinks_of
from optim.planner import RoundRequest, present_devices
from optim.problem import ClusterSolver, Latency, Partition
from optim.round.problem import RoundOptions
from optim.sharing.bounds import least_batch_s
from optim.simulated_plan import law_for, of_schedules
from optim.step import schedules

T = TypeVar("T")

_UNFINISHED = Partition((), 1, math.inf, bound_s=0.0)


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
            points = front_of(own, cluster, problem, solve, rng)
        except InfeasibleRoundError as error:
            reasons.append(error)
            continue
        found[schedule] = tuple(replace(point, schedule=schedule) for point in points)
    if not found:
        raise reasons[-1]
    if kept := request.kept_by(cluster.unit):
        same = {n: front for n, front in found.items() if keeps(kept, front, request, cluster)}
        found = same or found
    within = {name: front for name, front in found.items() if not front[0].over_limits}
    found = within or found
    if law is None or len(found) == 1:
        return next(iter(found.values()))
    return of_schedules(found, law)


def fastest(front: Front) -> Partition:
    """Return the point with the fastest pipeline, without the uplink's time."""
    return min(front, key=lambda point: point.latency_s)
