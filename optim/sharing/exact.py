"""Solve Sub-1 with shared stages exactly. See ``optim.sharing.search``.

A cluster of too many different devices is bounded by one with few kinds of similar devices.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from optim.latency import block_caps
from optim.partition.exact import pipelines
from optim.problem import ClusterProblem, ClusterSolution, Partition
from optim.sharing.alike import as_kinds, similar_kinds
from optim.sharing.bounds import stage_bounds
from optim.sharing.caps import Caps, caps_by_place
from optim.sharing.law import row_caps, stages_of
from optim.sharing.modes import decided, relaxed, with_hops
from optim.sharing.search import Search
from optim.sharing.states import kinds_of, num_pairs, ordered_states

MOST_PAIRS = 2**17
"""Pairs of a set and a group, beyond which similar devices count as one kind."""
_MOST_MERGED = 2**16  # most pairs of a set and a group of similar devices
_NODES_PER_MERGED = 24  # nodes of the limit for each such pair; a round has many searches
_MOST_ORDERED = 2**16  # most pairs if stages have an order
_MOST_LINKED = 2**16  # most products of pairs and classes of the next stage


def shared_partition(
    problem: ClusterProblem, rng: np.random.Generator | None = None, max_nodes: float = math.inf
) -> ClusterSolution:
    """Return the fastest partitions with shared stages for the problem's uplink times.

    The front does not depend on S: it suits rounds whose objective has no price for segments.
    Every device counts as the first of all, without recomputing, and with its usual hop: see
    ``placed_partition``. ``rng`` is not used. Raises ``InfeasibleRoundError`` if the devices cannot
    hold the model.
    """
    problem = replace(problem, devices=tuple(each.before(()) for each in problem.devices))
    problem = problem.in_modes(())
    start, kinds, open_s = time.perf_counter(), kinds_of(problem.devices), math.inf
    few = num_pairs(tuple(map(len, kinds))) <= MOST_PAIRS
    search = Search(problem, stage_bounds(problem), [Caps.of([problem], kinds)], 1, max_nodes)
    if few:
        search.glance()
    if (block_caps(problem).sum(axis=1) >= problem.num_blocks).any():
        single, open_s, _ = pipelines(problem, max_nodes, search.points)
        search.offer(single)
    search.only_shared = math.isinf(open_s)  # the bounds are of plans with a sync
    open_s = min(open_s, search.run() if few else search.one_stage_of_all())
    if not few and math.isfinite(open_s):
        open_s = max(open_s, _of_kinds(search, problem, max_nodes))
    if not (few or search.points):
        search.offer(_of_some(problem, max_nodes))
    return search.solution(open_s, start)


def _of_some(problem: ClusterProblem, max_nodes: float) -> list[Partition]:
    """Return plans with shared stages of those devices that can hold most rows, as many as can be
    searched; none if they cannot hold the model."""
    all_devices = range(len(problem.devices))
    order = sorted(all_devices, key=lambda k: -row_caps(problem, problem.devices[k])[0].sum())
    for count in reversed(all_devices):
        used = sorted(order[:count])
        few = problem.only(used)
        if num_pairs(tuple(map(len, kinds_of(few.devices)))) <= MOST_PAIRS:
            break
    try:
        front = shared_partition(few, max_nodes=max_nodes).front
    except InfeasibleRoundError:
        return []
    return [point.among(used, len(all_devices)) for point in front]


def placed_partition(
    problem: ClusterProblem,
    known: Sequence[Partition] = (),
    max_nodes: float = math.inf,
    by_segments: bool = False,
) -> ClusterSolution | None:
    """Return the fastest partitions if what a device can hold depends on its place in the
    pipeline, or on whether it recomputes; None if there are too many devices.

    With ``by_segments`` the front has the fastest for each S, as ``exact_partition``'s.
    ``known`` are plans. Raises ``InfeasibleRoundError`` if the devices cannot hold the model.
    """
    start, kinds = time.perf_counter(), kinds_of(problem.devices)
    if num_pairs(tuple(map(len, kinds))) > _MOST_ORDERED:
        return None
    states, by_next_class = ordered_states(problem, kinds)
    if len(states.sets) * len(by_next_class) > _MOST_LINKED:
        return None
    most = min(len(problem.devices), problem.num_blocks)
    bounds, caps = stage_bounds(relaxed(problem), shares=False), caps_by_place(by_next_class, kinds)
    slowest = max(each.recomputing.times if each.recomputing else 1.0 for each in problem.devices)
    # the slowest hops instead of the fastest, as in ``relaxed``
    hops_s = (each.time.hop(problem.batch_size) for each in with_hops(problem, max).devices)
    bounds = replace(bounds, longest=bounds.longest * slowest + problem.linked * max(hops_s))
    sizes = most if by_segments else 1
    search = Search(problem, bounds, caps, sizes, max_nodes, most, (states, by_next_class))
    search.offer(known)
    return search.solution(search.run(), start)


def _of_kinds(search: Search, problem: ClusterProblem, max_nodes: float) -> float:
    """Offer the fastest plans, for the first uplink time, if devices are as bad as the worst of
    a few kinds, and if they are as good as the best, as far as the real ones can hold these.
    Return a lower bound of all plans, s; 0 if the devices' limits have too many forms."""
    bound_s, devices, b = 0.0, problem.devices, problem.batch_size
    order = sorted(range(len(devices)), key=lambda k: devices[k].time.chunk(1, b))
    fastest_first = tuple(devices[k] for k in order)  # which plans use first of a kind
    ordered = replace(problem, devices=fastest_first, activation_s=problem.activation_s[:1])
    most = int(min(_MOST_MERGED, max_nodes / _NODES_PER_MERGED))
    if (kinds := similar_kinds(ordered, most)) is None:
        return bound_s
    for best in (True, False):
        with suppress(InfeasibleRoundError):
            found = shared_partition(as_kinds(ordered, kinds, best), max_nodes=max_nodes)
            if best:
                bound_s = found.certificate.lower_bound
            for point in found.front:
                _offer_if_held(search, problem, point.among(order, len(order)))
    return bound_s


def _offer_if_held(search: Search, problem: ClusterProblem, point: Partition) -> None:
    """Offer the plan with balanced rows, if the devices can hold it."""
    m = point.num_micro_batches
    stages = [search.stage(each.devices, each.blocks, m, 1) for each in stages_of(problem, point)]
    alone = [(each.devices[0], each.blocks) for each in stages if len(each.devices) == 1]
    caps = block_caps(problem)[m - 1]
    if all(each.rows for each in stages) and all(caps[k] >= held for k, held in alone):
        search.offer([decided(problem, stages, m)])
