"""Solve Sub-1 exactly: the fastest partitions of a cluster for every number of segments.

Under the law ``bound`` this is the smallest (S + m - 1)·max chunk for every S. For given m and S a
threshold T on the chunk is feasible if the S largest numbers of blocks that devices compute within
T sum to L or more. One sort for given m and T thus decides for every S.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.plan import Certificate
from optim.latency import batch_s, model_too_large, partition_of
from optim.partition.additive import sum_splits
from optim.partition.envelope import Envelope, Splits
from optim.partition.rates import PROGRESS, Rates, batch_seconds, segments_needed
from optim.problem import (
    Bools,
    ClusterProblem,
    ClusterSolution,
    Floats,
    Ints,
    Partition,
    UplinkTimes,
)

GRID = 12


def exact_partition(
    problem: ClusterProblem, rng: np.random.Generator | None = None, max_nodes: float = math.inf
) -> ClusterSolution:
    """Return the whole front of Sub-1: for each S the proven fastest partition with at most S.

    ``rng`` is not used. ``max_nodes``, the nodes after which the search ends, may leave the front
    incomplete; the certificate's lower bound of the latency still holds.

    Raises ``InfeasibleRoundError`` if the caps cannot hold the model for any m.
    """
    start = time.perf_counter()
    front, open_s, least_s = pipelines(problem, max_nodes)
    return certified(problem, front, "exact", start, open_s, least_s)


def certified(
    problem: ClusterProblem,
    front: tuple[Partition, ...],
    solver: str,
    start: float,
    open_s: float,
    least_s: float = math.inf,
) -> ClusterSolution:
    """Return the solution with the fastest point for the first uplink time as the best one.

    ``open_s`` is a lower bound of what the search left open, infinite if nothing; ``least_s`` of
    all points. ``start`` is ``perf_counter`` at the solver's start.
    """
    # Of equally fast points the first one has the fewest segments.
    times = [batch_s(point, problem.activation_s[0]) for point in front]
    fastest = min(range(len(front)), key=times.__getitem__)
    lower = min(times[fastest], least_s, open_s)
    # After a complete search the gap is only rounding.
    lower = times[fastest] if lower >= times[fastest] * (1 - 10 * PROGRESS) else lower
    certificate = Certificate(times[fastest], lower, solver, time.perf_counter() - start)
    return ClusterSolution(front, front[fastest], certificate, complete=math.isinf(open_s))


def pipelines(
    problem: ClusterProblem, max_nodes: float, known: Sequence[Partition] = ()
) -> tuple[tuple[Partition, ...], float, float]:
    """Return the front, a lower bound, s, of what the search left open, infinite if nothing, and
    the least time at the first uplink time. Pipelines that take longer than a plan of ``known`` by
    more than rounding may be missing."""
    rates = Rates.of(problem)
    if not rates.sufficient_rows().size:
        raise model_too_large(problem)
    continuous, splits = math.isinf(problem.activation_s[-1]), _alone(rates)
    slower = [each for each in known if each.slowest_s > 0]
    if slower:
        row = np.array([each.num_micro_batches - 1 for each in slower])
        slowest = np.array([each.slowest_s for each in slower]) * (1 + 10 * PROGRESS)
        total = np.array([each.latency_s for each in slower]) * (1 + 10 * PROGRESS) - row * slowest
        blocks = np.zeros((len(row), rates.caps.shape[1]), dtype=int)
        splits += Splits(np.ones_like(row), row, total, slowest, blocks)
    best = Envelope(_times(problem, rates), continuous, rates.max_segments, splits)
    search = bound_splits if rates.paced else sum_splits
    open_s = search(rates, best, max_nodes)
    splits, ranges = best.front()
    found = zip(splits.blocks.tolist(), splits.row.tolist(), ranges.tolist(), strict=True)
    front = tuple(
        replace(partition_of(problem, blocks, row + 1), fastest_s=UplinkTimes(first, last))
        for blocks, row, (first, last) in found
        if any(blocks)
    )
    return front, open_s, best.least


def _times(problem: ClusterProblem, rates: Rates) -> Floats:
    """Return the requested uplink times. Infinity is replaced by a time beyond which the uplink is
    the slowest stage of every partition."""
    most = rates.bottleneck(np.arange(len(rates.caps)), rates.caps).max(axis=1)
    counts = np.arange(1, len(most) + 1)
    slowest = float((counts * np.maximum(most, rates.floor)).max())
    *finite, last = problem.activation_s
    return np.array([*finite, last if math.isfinite(last) else max(finite[-1], slowest)])


def _alone(rates: Rates) -> Splits:
    """Return the splits with S = 1: each device that can hold all blocks, with each m."""
    row, device = np.nonzero(rates.caps >= rates.num_blocks)
    blocks = np.zeros((len(row), rates.caps.shape[1]))
    blocks[np.arange(len(row)), device] = rates.num_blocks
    return Splits.of(rates, row, blocks)


def bound_splits(rates: Rates, best: Envelope, max_nodes: float) -> float:
    """Add the best partitions of each S ≥ 2 to ``best``, which already holds S = 1.

    Returns a lower bound, s, of the latencies at the first uplink time that the search left open;
    infinite after a complete search. A grid of thresholds gives each pair (S, m), a node, an
    interval of latencies. Pairs that are certainly the fastest at the ends of the uplink times are
    solved exactly first, then all others that may still be fastest somewhere, if ``max_nodes``
    allows that many.
    """
    pairs = _pairs(rates)
    for activation_s in {float(best.times[0]), float(best.times[-1])}:
        _offer(best, rates, pairs.fastest(rates, activation_s))
    pairs = pairs.below(rates, best)
    if len(pairs.row) <= max_nodes:
        _offer(best, rates, pairs)
        pairs = pairs.where(np.zeros(len(pairs.row), bool))
    return float(pairs.latency(rates, pairs.low, float(best.times[0])).min(initial=math.inf))


@dataclass(frozen=True, slots=True)
class _Brackets:
    """Pairs of m - 1 and S, each with an interval that contains its smallest feasible threshold."""

    row: Ints
    segments: Ints
    low: Floats
    high: Floats

    def where(self, keep: Bools | Ints) -> "_Brackets":
        """Select some of the pairs."""
        return _Brackets(self.row[keep], self.segments[keep], self.low[keep], self.high[keep])

    def latency(self, rates: Rates, threshold: Floats, activation_s: float) -> Floats:
        """Return the seconds of a batch if the thresholds are the slowest chunks, [N]."""
        slowest = np.maximum(threshold, rates.floor[self.row])
        total = self.segments * threshold + rates.after_uplink[self.row]
        return batch_seconds(total, slowest, self.row, activation_s)

    def below(self, rates: Rates, best: Envelope) -> "_Brackets":
        """Select the pairs that may be the fastest of their S for some uplink time."""
        goal = best.goal(self.row, np.maximum(self.low, rates.floor[self.row]))
        total = self.segments * self.low + rates.after_uplink[self.row]
        return self.where(total < goal[np.arange(len(total)), self.segments - 1])

    def fastest(self, rates: Rates, activation_s: float) -> "_Brackets":
        """Select the pair of each S with the smallest upper bound of the latency."""
        latency = self.latency(rates, self.high, activation_s)
        order = np.lexsort((self.row, latency, self.segments))
        _, first = np.unique(self.segments[order], return_index=True)
        return self.where(order[first])


def _offer(best: Envelope, rates: Rates, pairs: _Brackets) -> None:
    """Make the pairs exact and offer those that can improve ``best``."""
    pairs = _exact(rates, pairs, best)
    held = rates.held(pairs.row, pairs.high)
    blocks = _filled(rates, pairs.row, held, pairs.segments)
    best.offer(Splits.of(rates, pairs.row, blocks))


def _pairs(rates: Rates) -> _Brackets:
    """Return all feasible pairs with S ≥ 2, with intervals from a grid of thresholds."""
    rows, sizes = rates.sufficient_rows(), np.arange(2, rates.max_segments + 1)
    low, high = rates.threshold_range(rows)
    grid = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, GRID)
    held = rates.held(np.repeat(rows, GRID), grid.ravel())
    needed = segments_needed(held, rates.num_blocks).reshape(grid.shape)
    # Index of the first feasible threshold, [N, S]; the threshold before it is infeasible.
    first = (needed[:, :, None] > sizes).sum(axis=1)
    place, column = np.nonzero(first < GRID)
    first = first[place, column]
    return _Brackets(
        rows[place], sizes[column], grid[place, np.maximum(first - 1, 0)], grid[place, first]
    )


def _exact(rates: Rates, pairs: _Brackets, best: Envelope) -> _Brackets:
    """Find the smallest feasible thresholds by bisection. Each step moves a threshold to a real
    chunk of a device, so the result is exact.

    Pairs that cannot be faster than ``best`` are dropped on the way.
    """
    while len(pairs.row) and (pairs.low < pairs.high * (1 - PROGRESS)).any():
        middle = (pairs.low + pairs.high) / 2
        enough, chunk = _probe(rates, pairs.row, pairs.segments, middle)
        high = np.where(enough, np.minimum(chunk, pairs.high), pairs.high)
        low = np.where(enough, pairs.low, np.maximum(chunk, pairs.low))
        pairs = _Brackets(pairs.row, pairs.segments, low, high).below(rates, best)
    return pairs


def _probe(rates: Rates, row: Ints, segments: Ints, threshold: Floats) -> tuple[Bools, Floats]:
    """Return whether thresholds are feasible, and the slowest chunk in use if so, else the next
    larger chunk."""
    held = rates.held(row, threshold)
    enough = _largest(held, segments) >= rates.num_blocks
    chunk = rates.bottleneck(row, held + ~enough[:, None])
    slowest = np.where(held > 0, chunk, 0).max(axis=1)
    fastest = np.where(held < rates.caps[row], chunk, np.inf).min(axis=1)
    return enough, np.where(enough, slowest, fastest)


def _largest(held: Floats, segments: Ints) -> Floats:
    """Return the sum of the S largest values of each row."""
    smallest = np.cumsum(np.sort(held, axis=1), axis=1)
    others = held.shape[1] - segments - 1
    rest = np.where(others < 0, 0, smallest[np.arange(len(segments)), others])
    largest: Floats = smallest[:, -1] - rest
    return largest


def _filled(rates: Rates, row: Ints, held: Floats, segments: Ints) -> Floats:
    """Return δ on the S devices that can hold most blocks, [N, K]: one block each, then more blocks
    on devices with small a first."""
    order = np.argsort(-held, axis=1, kind="stable")
    used = np.zeros(held.shape, bool)
    np.put_along_axis(used, order, np.arange(held.shape[1]) < segments[:, None], axis=1)
    used &= held > 0
    room = np.where(used, held - 1, 0)
    order = np.argsort(rates.per_block[row], axis=1, kind="stable")
    sorted_room = np.take_along_axis(room, order, axis=1)
    left = rates.num_blocks - used.sum(axis=1, keepdims=True)
    more = np.clip(left - (np.cumsum(sorted_room, axis=1) - sorted_room), 0, sorted_room)
    np.put_along_axis(room, order, more, axis=1)
    return np.asarray(room + used)
