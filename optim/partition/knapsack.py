"""The fixed-charge knapsacks of the additive laws: relax by a price, round, and solve.

For given m and threshold T each used device k pays its hop g_k once, and a_k for each of at most
cap_k blocks. With a price of μ for each of the L blocks, a used device has the reduced cost
r_k = g_k + (a_k - μ)·cap_k, and at most S devices cost at least

    μ·L + Σ of the S smallest min(r_k, 0).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optim.partition.envelope import Envelope
from optim.partition.rates import Rates, batch_seconds, segments_needed
from optim.problem import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The device of each node that sets its threshold, so that the device is in use."""

    device: Ints  # the device's column, [N]
    by_hop: Bools  # True if its hop is the threshold; False if it holds its cap, [N]

    def where(self, keep: Bools | Ints) -> "Bottleneck":
        """Select the bottlenecks of some nodes."""
        return Bottleneck(self.device[keep], self.by_hop[keep])


@dataclass(frozen=True, slots=True)
class Nodes:
    """N ranges of thresholds, each for one m; devices are sorted by ascending a."""

    rates: Rates  # of all rows
    row: Ints  # m - 1, [N]
    low: Floats  # the bottleneck is in (low, high], or low = high, s, [N]
    high: Floats
    least: Floats  # lower bound of Σ with at most S segments, s, [N, Smax]; infinite if S is closed
    per_block: Floats  # a, [N, K]
    hop: Floats  # g, [N, K]
    caps: Floats  # at ``high``, [N, K]
    bottleneck: Bottleneck | None = None  # None if not known yet

    @classmethod
    def of(
        cls,
        rates: Rates,
        row: Ints,
        low: Floats,
        high: Floats,
        least: Floats,
        bottleneck: Bottleneck | None = None,
    ) -> "Nodes":
        """Make nodes, with the caps at ``high``."""
        caps = rates.held(row, high)
        a, g = rates.per_block[row], rates.hop[row]
        return cls(rates, row, low, high, least, a, g, caps, bottleneck)

    def where(self, keep: Bools | Ints) -> "Nodes":
        """Select some of the nodes."""
        names = ("row", "low", "high", "least", "per_block", "hop", "caps")
        kept: dict[str, Any] = {name: getattr(self, name)[keep] for name in names}
        return replace(self, **kept, bottleneck=self.bottleneck and self.bottleneck.where(keep))

    def goal(self, best: Envelope) -> Floats:
        """Return the value [N, Smax], s, that Σ without the stages after the uplink must beat."""
        goal = best.goal(self.row, np.maximum(self.low, self.rates.floor[self.row]))
        return goal - self.rates.after_uplink[self.row][:, None]

    def below(self, best: Envelope) -> "Nodes":
        """Select nodes that may be faster than ``best`` for some S, and close their other S."""
        is_open = self.least < self.goal(best)
        keep: Bools = np.logical_or.reduce(is_open, axis=1)
        kept = self.where(keep)
        kept.least[~is_open[keep]] = np.inf
        return kept

    def fitting(self) -> "Nodes":
        """Close every S that is too small for the caps."""
        needed = segments_needed(self.caps, self.rates.num_blocks)
        sizes = np.arange(1, self.rates.max_segments + 1)
        return replace(self, least=np.where(sizes < needed[:, None], np.inf, self.least))

    def twins(self) -> Bools:
        """Return which devices equal the device before them, [N, K]."""
        same = np.zeros(self.caps.shape, bool)
        same[:, 1:] = True
        for each in (self.per_block, self.hop, self.rates.caps[self.row]):
            same[:, 1:] &= each[:, 1:] == each[:, :-1]
        return same

    def critical_prices(self) -> Floats:
        """Return a block's cost on the last device used by the relaxation without S, [N], s."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.caps > 0, self.per_block + self.hop / self.caps, np.inf)
        order = np.argsort(ratio, axis=1)
        filled = np.cumsum(np.take_along_axis(self.caps, order, axis=1), axis=1)
        last = np.argmax(filled >= self.rates.num_blocks, axis=1)
        index = np.arange(len(order))
        price = ratio[index, order[index, last]]
        return np.where(np.isfinite(price), price, 0)

    def relaxed(self, prices: Floats) -> "Nodes":
        """Raise ``least`` by the relaxation at the prices [N, P]."""
        least = self.least
        for price in prices.T:
            least = np.maximum(least, self.bounds(price, self.cheapest(price)))
        return replace(self, least=least)

    def latency(self, activation_s: float) -> Floats:
        """Return a lower bound of a batch's seconds for an uplink time, [N, Smax]."""
        slowest = np.maximum(self.low, self.rates.floor[self.row])
        added = batch_seconds(self.rates.after_uplink[self.row], slowest, self.row, activation_s)
        return np.asarray(self.least + added[:, None])

    def bounds(self, price: Floats, cheapest: Floats) -> Floats:
        """Return the relaxation of each S at a price [N], [N, Smax]. ``cheapest`` is the result of
        the method of that name."""
        bound: Floats = np.cumsum(cheapest, axis=1)
        bound += (price * self.rates.num_blocks)[:, None]
        return bound

    def reduced_costs(self, price: Floats) -> Floats:
        """Return r_k, [N, K]; 0 for devices that hold no block."""
        cost = self.per_block - price[:, None]
        cost *= self.caps
        cost += self.hop
        cost[self.caps == 0] = 0
        return cost

    def cheapest(self, price: Floats) -> Floats:
        """Return min(r_k, 0) of the Smax cheapest devices, ascending, [N, Smax]. A known bottleneck
        comes first."""
        cost = self.reduced_costs(price)
        most = self.rates.max_segments
        if self.bottleneck is None:
            cost.sort(axis=1)
            return np.minimum(cost[:, :most], 0)
        index, device = np.arange(len(cost)), self.bottleneck.device
        paid = cost[index, device]
        # If only its hop is needed, a device with a above the price holds one block.
        one = self.per_block[index, device] - price + self.hop[index, device]
        paid = np.where(self.bottleneck.by_hop, np.minimum(paid, one), paid)
        cost[index, device] = -np.inf
        cost.sort(axis=1)
        cheapest = np.minimum(cost[:, :most], 0)
        cheapest[:, 0] = paid
        return cheapest

    def rounded(self, segments: Ints, prices: Floats) -> tuple[Ints, Floats, Floats]:
        """Round to partitions over the S cheapest devices at each price [N, P]; devices with small
        a are filled first.

        Returns m - 1 and δ of the partitions that hold L blocks, and the relaxation at each price
        without the bottleneck's part, [N, P].
        """
        count = prices.shape[1]
        each = self.where(np.repeat(np.arange(len(self.row)), count))
        cost = each.reduced_costs(prices.ravel())
        cost[each.caps == 0] = np.inf
        order = np.argsort(cost, axis=1)
        first = np.arange(cost.shape[1]) < np.repeat(segments, count)[:, None]
        cheapest = np.where(first, np.minimum(np.take_along_axis(cost, order, axis=1), 0), 0)
        bounds = cheapest.sum(axis=1).reshape(prices.shape) + prices * self.rates.num_blocks
        used = np.zeros(cost.shape, bool)
        np.put_along_axis(used, order, first, axis=1)
        room = np.where(used, each.caps, 0)
        filled = np.cumsum(room, axis=1)
        enough = filled[:, -1] >= self.rates.num_blocks
        rest = self.rates.num_blocks - (filled - room)[enough]
        return each.row[enough], np.clip(rest, 0, room[enough]), bounds


def useful_devices(node: Nodes, prices: Floats, goal: Floats) -> Ints:
    """Return the devices of one node that a partition with Σ below the goal [Smax] may use.

    The relaxation at the prices [P] decides. A device that is not among the S cheapest replaces the
    last of these.
    """
    sizes = np.flatnonzero(np.isfinite(node.least[0]))
    each = node.where(np.zeros(len(prices), int))
    cheapest = each.cheapest(prices)
    bound = each.bounds(prices, cheapest)
    # A device with a above the price holds one block if it must be used.
    count = np.where(each.per_block > prices[:, None], np.minimum(each.caps, 1), each.caps)
    cost = each.hop + (each.per_block - prices[:, None]) * count
    extra = np.maximum(cost[:, None, :] - cheapest[:, sizes, None], 0)
    worth = ((bound[:, sizes, None] + extra).max(axis=0) < goal[sizes, None]).any(axis=0)
    worth &= node.caps[0] > 0
    if node.bottleneck is not None:
        worth[node.bottleneck.device] = True
    return np.flatnonzero(worth)


def solve(node: Nodes, devices: Ints, max_segments: int) -> tuple[Floats, Floats]:
    """Return the cheapest δ of each S on some devices of one node: costs [S], and δ [S, K].

    If S has no partition, its cost is infinite and its δ undefined. Moving blocks to a device with
    smaller a never costs more, so every used device except the last is full.
    """
    num_blocks = node.rates.num_blocks
    a, g = node.per_block[0, devices, None], node.hop[0, devices, None]
    rest = g + a * np.arange(num_blocks, 0, -1)  # cost of the last device, after j blocks
    caps = [int(cap) for cap in node.caps[0, devices]]
    whole = [float(cost) for cost in node.hop[0, devices] + node.per_block[0, devices] * caps]
    cost = np.full((max_segments, num_blocks), np.inf)  # cost of s full devices with j blocks
    cost[0, 0] = 0
    states, ends = [cost], np.empty((len(caps), max_segments))
    for place, cap in enumerate(caps):
        start = max(0, num_blocks - cap)
        (cost[:, start:] + rest[place, start:]).min(axis=1, out=ends[place])
        before, cost = cost, cost.copy()
        if start:
            np.minimum(cost[1:, cap:], before[:-1, :start] + whole[place], out=cost[1:, cap:])
        states.append(cost)
    blocks = np.zeros((max_segments, node.caps.shape[1]))
    for size, last in enumerate(ends.argmin(axis=0)):
        start, full = max(0, num_blocks - caps[last]), size
        held = start + int((states[last][size, start:] + rest[last, start:]).argmin())
        blocks[size, devices[last]] = num_blocks - held
        for place in range(last - 1, -1, -1):
            if states[place][full, held] != states[place + 1][full, held]:
                blocks[size, devices[place]] = caps[place]
                full, held = full - 1, held - caps[place]
    return ends.min(axis=0), blocks
