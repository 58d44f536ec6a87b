"""Sub-1 under ``flow_shop`` and ``overlap``: Σ chunk + (m - 1)·max bottleneck, for every S.

A node is a range of thresholds on the bottleneck for one m. Each generation of nodes is relaxed.
Nodes that cannot beat the incumbent of any S are dropped; the others are split until each contains
few bottlenecks. Then each bottleneck becomes a node. Nodes that the relaxation cannot decide are
solved exactly.
"""

from dataclasses import dataclass

import numpy as np

from optim.partition.envelope import Envelope, Splits
from optim.partition.knapsack import Bottleneck, Nodes, solve, useful_devices
from optim.partition.rates import SAME, Rates
from optim.problem import Floats, Ints

RANGES = 8
PIECES = 3
FEW_BOTTLENECKS = 3
NARROW = 1.001
# Factors on a price: before a good price is known, around a known price, and at the end. With the
# factor 1e9 the devices with the largest caps are the cheapest.
FIRST_FACTORS = np.array([1.0, 1.15, 1.5])
WIDE_FACTORS = np.array([0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.8, 2.4, 1e9])
NEAR_FACTORS = np.array([0.85, 0.95, 1.0, 1.05, 1.2, 1e9])
LAST_FACTORS = np.array([0.85, 0.95, 1.0, 1.05, 1.15, 1.3])
NODES_PER_SOLUTION = 100  # relaxed nodes that take as long as an exact solution and its envelope


def sum_splits(rates: Rates, best: Envelope, max_nodes: float) -> float:
    """Add the best partitions of each S ≥ 2 to ``best``, which already holds S = 1.

    Returns a lower bound, s, of the latencies at the first uplink time that the search left open
    after ``max_nodes``; infinite after a complete search. A node that is solved exactly counts as
    ``NODES_PER_SOLUTION``.
    """
    search = _Search(rates, best)
    nodes = _roots(search.rates)
    nodes = nodes.relaxed(nodes.critical_prices()[:, None] * FIRST_FACTORS)
    nodes = nodes.below(best).fitting()
    prices, factors, left = _Prices.of(nodes, float(best.times[0])), WIDE_FACTORS, max_nodes
    while len(nodes.row):
        left -= len(nodes.row)
        search.round(nodes, prices, factors)
        nodes = nodes.below(best)
        if nodes.bottleneck is not None or left < 0:
            break
        nodes, factors = _split(nodes), NEAR_FACTORS
        nodes = nodes.relaxed(prices.of_nodes(nodes)).below(best).fitting()
    if nodes.bottleneck is not None:
        nodes = nodes.relaxed(prices.around(nodes)).below(best)
        while len(nodes.row) and left > 0:
            count = 1 + len(best.knot) // 4  # each turn rebuilds the envelope, which takes longer
            left -= count * NODES_PER_SOLUTION
            nodes = search.settle(nodes, prices, count)
    return float(nodes.latency(float(best.times[0])).min(initial=np.inf))


@dataclass(frozen=True, slots=True)
class _Prices:
    """The price of a block that gives a good bound for S segments; improved during the search."""

    unit: Floats  # mean a of each row, s, [M], by which a price for one m suits another m
    of_size: Floats  # price for each S in these units, [Smax]

    @classmethod
    def of(cls, nodes: Nodes, activation_s: float) -> "_Prices":
        """Return the first guess: the critical price of the most promising node of each S at this
        uplink time."""
        unit, most = nodes.rates.per_block.mean(axis=1), nodes.rates.max_segments
        if not len(nodes.row):
            return cls(unit, np.ones(most))
        pick = nodes.where(nodes.latency(activation_s).argmin(axis=0))
        return cls(unit, pick.critical_prices() / unit[pick.row])

    def of_nodes(self, nodes: Nodes) -> Floats:
        """Return the prices of the smallest and the largest open S of each node, [N, 2], s."""
        is_open = np.isfinite(nodes.least)
        first = is_open.argmax(axis=1)
        last = is_open.shape[1] - 1 - is_open[:, ::-1].argmax(axis=1)
        of_size: Floats = self.of_size[np.stack([first, last], axis=1)]
        return of_size * self.unit[nodes.row][:, None]

    def around(self, nodes: Nodes) -> Floats:
        """Return the prices of ``of_nodes`` and others near them, [N, P], s."""
        prices = self.of_nodes(nodes)
        return np.concatenate([prices * each for each in LAST_FACTORS], axis=1)


def _roots(rates: Rates) -> Nodes:
    """Make ranges that cover every bottleneck of every m."""
    rows = rates.sufficient_rows()
    low, _ = rates.threshold_range(rows)
    caps = rates.caps[rows]
    high = np.where(caps > 0, rates.bottleneck(rows, caps), 0).max(axis=1)
    row, low, high = _cut(rows, low, high, RANGES)
    least = np.zeros((len(row), rates.max_segments))
    least[:, 0] = np.inf  # S = 1 is already solved
    return Nodes.of(rates, row, low, high, least)


def _cut(row: Ints, low: Floats, high: Floats, pieces: int) -> tuple[Ints, Floats, Floats]:
    """Cut each range into pieces of equal ratio."""
    edges = low[:, None] * (high / low)[:, None] ** (np.arange(pieces + 1) / pieces)
    return np.repeat(row, pieces), edges[:, :-1].ravel(), edges[:, 1:].ravel()


def _split(nodes: Nodes) -> Nodes:
    """Split into single bottlenecks if few are left or ranges are narrow, else smaller ranges."""
    fewer = nodes.rates.held(nodes.row, nodes.low)
    # Of equal devices only the first one needs to be considered as the bottleneck.
    fewer[nodes.twins()] = np.inf
    left = np.maximum(nodes.caps - fewer, 0).sum()
    if left < FEW_BOTTLENECKS * len(nodes.row) or (nodes.high < nodes.low * NARROW).all():
        return _leaves(nodes, fewer)
    row, low, high = _cut(nodes.row, nodes.low, nodes.high, PIECES)
    return Nodes.of(nodes.rates, row, low, high, np.repeat(nodes.least, PIECES, axis=0))


def _leaves(nodes: Nodes, fewer: Floats) -> Nodes:
    """Make a node of each bottleneck: a device with more than ``fewer`` blocks, or its hop."""
    rates = nodes.rates
    if rates.overlapping:
        # With fewer blocks the hop takes longer than the computation.
        fewer = np.maximum(fewer, np.ceil(nodes.hop / nodes.per_block * (1 - SAME)) - 1)
    node, device, blocks = _steps(fewer, nodes.caps)
    row = nodes.row[node]
    threshold = rates.per_block[row, device] * blocks + rates.lead[row, device]
    by_hop = np.zeros(len(node), bool)
    if rates.overlapping:
        hops = _hops_within(nodes)
        node, device = (np.concatenate(pair) for pair in zip((node, device), hops, strict=True))
        threshold = np.concatenate([threshold, nodes.hop[hops]])
        by_hop = np.arange(len(node)) >= len(by_hop)
    bottleneck = Bottleneck(device, by_hop)
    return Nodes.of(rates, nodes.row[node], threshold, threshold, nodes.least[node], bottleneck)


def _steps(fewer: Floats, more: Floats) -> tuple[Ints, Ints, Floats]:
    """Return node, device and each number of blocks above ``fewer`` up to ``more``, both [N, K]."""
    count = np.maximum(more - fewer, 0).astype(int).ravel()
    place = np.repeat(np.arange(count.size), count)
    above = np.arange(1, len(place) + 1) - np.repeat(np.cumsum(count) - count, count)
    node, device = np.divmod(place, fewer.shape[1])
    return node, device, fewer.ravel()[place] + above


def _hops_within(nodes: Nodes) -> tuple[Ints, Ints]:
    """Return node and device of each hop in the node's range, at least as long as a block."""
    low, high = (edge[:, None] * (1 + SAME) for edge in (nodes.low, nodes.high))
    usable = (nodes.rates.caps[nodes.row] > 0) & ~nodes.twins()
    usable &= nodes.hop * (1 + SAME) >= nodes.per_block
    node, device = np.nonzero((nodes.hop > low) & (nodes.hop <= high) & usable)
    return node, device


class _Search:
    """Offers partitions to the envelope. Nodes sort the devices by ascending a; offers use the
    original order."""

    def __init__(self, rates: Rates, best: Envelope) -> None:
        self._order = np.argsort(rates.per_block, axis=1, kind="stable")
        self._given, self._best = rates, best
        self.rates = rates.reordered(self._order)

    def round(self, nodes: Nodes, prices: "_Prices", factors: Floats) -> None:
        """Offer partitions of the most promising nodes of each S, and improve the prices."""
        latencies = np.array([nodes.latency(each) for each in self._best.samples()])
        picks = latencies.argmin(axis=1)
        possible = np.isfinite(np.take_along_axis(latencies, picks[:, None], axis=1)[:, 0])
        # Remove repeated pairs of node and S.
        sizes, picked = np.unique(np.stack([np.nonzero(possible)[1], picks[possible]]), axis=1)
        chosen = nodes.where(picked)
        offers = (prices.of_size[sizes] * prices.unit[chosen.row])[:, None] * factors
        row, blocks, bounds = chosen.rounded(sizes + 1, offers)
        prices.of_size[sizes] *= factors[bounds[:, :-1].argmax(axis=1)]
        self._offer(row, blocks)

    def settle(self, nodes: Nodes, prices: "_Prices", count: int) -> Nodes:
        """Solve the ``count`` most promising nodes, and return the others that are still open."""
        goals = np.minimum(nodes.goal(self._best), np.finfo(float).max)
        promise = np.maximum(goals - nodes.least, 0)
        order = np.argsort(-promise.max(axis=1))
        solved = [
            self._solve(nodes.where(np.array([index])), prices, goals[index], promise[index])
            for index in order[:count]
        ]
        self._offer(*(np.concatenate(each) for each in zip(*solved, strict=True)))
        return nodes.where(order[count:]).below(self._best)

    def _solve(
        self, node: Nodes, prices: "_Prices", goal: Floats, promise: Floats
    ) -> tuple[Ints, Floats]:
        """Return m - 1 and δ of one node's cheapest partitions with Σ below the goal."""
        devices = useful_devices(node, prices.around(node)[0], goal)
        most = min(int(np.flatnonzero(promise)[-1]) + 1, len(devices))
        cost, blocks = solve(node, devices, most)
        better = np.flatnonzero(cost < goal[:most])
        return np.full(len(better), node.row[0]), blocks[better]

    def _offer(self, row: Ints, blocks: Floats) -> None:
        """Offer feasible partitions, [N] and [N, K]."""
        first = np.zeros_like(blocks)
        np.put_along_axis(first, self._order[row], blocks, axis=1)
        self._best.offer(Splits.of(self._given, row, first))
