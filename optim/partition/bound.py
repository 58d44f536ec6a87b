"""Sub-1 under the law ``bound``: the smallest (S + m - 1)·max chunk, for every S.

For given m and S a threshold T on the chunk suffices if the S largest numbers of blocks that
devices do within T sum to L or more. So one sort of a row (m, T) answers for every S.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from optim.partition.rates import PROGRESS, BestSplits, Rates, segments_needed
from optim.problem import Bools, Floats, Ints

GRID = 12


def bound_splits(rates: Rates, best: BestSplits, deadline: float) -> float:
    """Put the best of each S ≥ 2 into ``best``, and return a lower bound of all latencies, s.

    A grid of thresholds gives each pair (S, m) an interval and each S an incumbent m, whose
    threshold is made exact. One test of each other pair then tells whether it is any faster; the
    few that are, are made exact too. ``best`` has S = 1 already; the lower bound holds also if the
    deadline, in seconds of ``time.perf_counter``, ends the search.
    """
    pairs = _pairs(rates)
    _offer(best, rates, pairs.fastest())
    pairs = pairs.below(best.goal())
    if time.perf_counter() < deadline:
        contenders = _contenders(rates, _without_tail(rates, pairs, best), best)
        _offer(best, rates, contenders)
        pairs = contenders.where(np.zeros(len(contenders.row), bool))
    return min(float(best.latency.min()), float((pairs.low * pairs.length).min(initial=math.inf)))


@dataclass(frozen=True, slots=True)
class _Brackets:
    """Pairs of m - 1 and S, and the thresholds between which the smallest feasible one lies."""

    row: Ints
    segments: Ints
    low: Floats
    high: Floats

    @property
    def length(self) -> Ints:
        """S + m - 1."""
        return self.row + self.segments

    def where(self, keep: Bools | Ints) -> "_Brackets":
        """Some of them."""
        return _Brackets(self.row[keep], self.segments[keep], self.low[keep], self.high[keep])

    def below(self, goal: Floats) -> "_Brackets":
        """Those that may be faster than their S's [Smax]."""
        return self.where(self.low * self.length < goal[self.segments - 1])

    def fastest(self) -> "_Brackets":
        """Pick the pair of each S that is surely the fastest."""
        order = np.lexsort((self.row, self.high * self.length, self.segments))
        _, first = np.unique(self.segments[order], return_index=True)
        return self.where(order[first])


def _offer(best: BestSplits, rates: Rates, pairs: _Brackets) -> None:
    """Make the pairs exact and take what is better; the smaller m where they are equal."""
    threshold = _smallest_thresholds(rates, pairs)
    latency = threshold * pairs.length
    order = np.lexsort((pairs.row, latency))
    row, segments = pairs.row[order], pairs.segments[order]
    blocks = _filled(rates, row, rates.held(row, threshold[order]), segments)
    best.take(segments, latency[order], row, blocks)


def _pairs(rates: Rates) -> _Brackets:
    """All feasible pairs with S ≥ 2, bracketed by a grid of thresholds."""
    rows, sizes = rates.sufficient_rows(), np.arange(2, rates.max_segments + 1)
    low, high = rates.threshold_range(rows)
    grid = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, GRID)
    held = rates.held(np.repeat(rows, GRID), grid.ravel())
    needed = segments_needed(held, rates.num_blocks).reshape(grid.shape)
    # The first threshold that suffices, [N, S]; the one before it does not.
    first = (needed[:, :, None] > sizes).sum(axis=1)
    place, column = np.nonzero(first < GRID)
    first = first[place, column]
    return _Brackets(
        rows[place], sizes[column], grid[place, np.maximum(first - 1, 0)], grid[place, first]
    )


def _without_tail(rates: Rates, pairs: _Brackets, best: BestSplits) -> _Brackets:
    """Pairs of more segments than the fastest has, only if their m allows for it at all.

    They have to beat the same latency in more steps, so that one threshold per m answers for all.
    """
    fastest = int(best.latency.argmin()) + 1
    rows = np.arange(len(rates.caps))
    held = rates.held(rows, best.goal()[-1] / (rows + fastest + 1))
    needed = segments_needed(held, rates.num_blocks)
    return pairs.where((pairs.segments <= fastest) | (needed[pairs.row] <= pairs.segments))


def _contenders(rates: Rates, pairs: _Brackets, best: BestSplits) -> _Brackets:
    """The pairs that are faster than the incumbents."""
    high = best.goal()[pairs.segments - 1] / pairs.length
    enough = _largest(rates.held(pairs.row, high), pairs.segments) >= rates.num_blocks
    faster = _Brackets(pairs.row, pairs.segments, np.minimum(pairs.low, high), high)
    return faster.where(enough)


def _smallest_thresholds(rates: Rates, pairs: _Brackets) -> Floats:
    """Bisection; each threshold moves on to a chunk that a device has, so that it ends exactly."""
    low, high = pairs.low, pairs.high
    while (low < high * (1 - PROGRESS)).any():
        enough, chunk = _probe(rates, pairs.row, pairs.segments, (low + high) / 2)
        high = np.where(enough, np.minimum(chunk, high), high)
        low = np.where(enough, low, np.maximum(chunk, low))
    return high


def _probe(rates: Rates, row: Ints, segments: Ints, threshold: Floats) -> tuple[Bools, Floats]:
    """Whether thresholds suffice; the slowest chunk in use if so, else the next one above."""
    held = rates.held(row, threshold)
    enough = _largest(held, segments) >= rates.num_blocks
    chunk = rates.bottleneck(row, held + ~enough[:, None])
    slowest = np.where(held > 0, chunk, 0).max(axis=1)
    fastest = np.where(held < rates.caps[row], chunk, np.inf).min(axis=1)
    return enough, np.where(enough, slowest, fastest)


def _largest(held: Floats, segments: Ints) -> Floats:
    """The sum of the S largest of each row."""
    smallest = np.cumsum(np.sort(held, axis=1), axis=1)
    others = held.shape[1] - segments - 1
    rest = np.where(others < 0, 0, smallest[np.arange(len(segments)), others])
    largest: Floats = smallest[:, -1] - rest
    return largest


def _filled(rates: Rates, row: Ints, held: Floats, segments: Ints) -> Ints:
    """δ of the S devices with most room, [N, K]: one block each, then a small a first."""
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
    return (room + used).astype(int)
