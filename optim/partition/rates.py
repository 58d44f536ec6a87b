"""A cluster's costs as arrays, one row for each number of micro-batches."""

from dataclasses import dataclass, replace

import numpy as np

from optim.latency import block_caps, micro_batch_sizes
from optim.problem import ClusterProblem, Floats, Ints

# Times with a smaller relative difference are equal, so that a chunk is within its own threshold.
SAME = 1e-13
# A partition must beat the incumbent by more than this relative difference.
PROGRESS = 1e-11
# What takes no time counts as this long, because thresholds and rows are divided by it.
TINY_S = 1e-200
MOST_TINY_S = 1e-190  # of all blocks


@dataclass(frozen=True, slots=True)
class Rates:
    """The times of blocks and hops; row m - 1 of each array is for m micro-batches.

    A device that holds δ blocks is a bottleneck of max(a·δ + lead, g) seconds per micro-batch.
    """

    per_block: Floats  # a = u·b̂ + v, s, [M, K], positive
    hop: Floats  # g = w·b̂ + ℓ, s, [M, K]
    lead: Floats  # g, or 0 under ``overlap``, as the hop then runs in parallel to the compute
    caps: Floats  # blocks that memory and energy allow, [M, K]; whole numbers
    after_uplink: Floats  # total time of a micro-batch in the stages after the uplink, s, [M]
    floor: Floats  # time of a micro-batch in the slowest of these stages, s, [M]
    num_blocks: int
    paced: bool  # law ``bound``: every stage takes as long as the slowest

    @classmethod
    def of(cls, problem: ClusterProblem) -> "Rates":
        """Evaluate the problem's laws at b̂ = b/m."""
        laws = [device.time for device in problem.devices]
        u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T
        sizes = micro_batch_sizes(problem)[:, None]
        per_block, hop = u * sizes + v, w * sizes + ell
        per_block = np.maximum(per_block, TINY_S)
        lead = np.zeros_like(hop) if problem.latency == "overlap" else hop
        stages = np.array([problem.head_s, problem.gradient_s]) / problem.batch_size * sizes
        return cls(
            per_block,
            hop,
            lead,
            block_caps(problem).astype(float),
            stages.sum(axis=1),
            stages.max(axis=1),
            problem.num_blocks,
            problem.latency == "bound",
        )

    @property
    def overlapping(self) -> bool:
        """Whether a device sends while it computes."""
        return self.lead is not self.hop

    def reordered(self, order: Ints) -> "Rates":
        """Put the devices of each row in another order, [M, K]."""
        per_block, hop, caps = (
            np.take_along_axis(each, order, axis=1)
            for each in (self.per_block, self.hop, self.caps)
        )
        lead = self.lead if self.overlapping else hop
        return replace(self, per_block=per_block, hop=hop, lead=lead, caps=caps)

    @property
    def max_segments(self) -> int:
        """The largest number of segments, min(K, L)."""
        return min(int(self.caps.shape[1]), self.num_blocks)

    def held(self, row: Ints, threshold: Floats) -> Floats:
        """Return the most blocks that each device can hold within the threshold, [N, K]."""
        within = (threshold * (1 + SAME))[:, None]
        blocks = within - self.lead[row]
        blocks /= self.per_block[row]
        np.floor(blocks, out=blocks)
        np.minimum(blocks, self.caps[row], out=blocks)
        np.maximum(blocks, 0, out=blocks)
        if self.overlapping:
            blocks[self.hop[row] > within] = 0
        return blocks

    def bottleneck(self, row: Ints, blocks: Floats) -> Floats:
        """Return max(a·δ + lead, g) of each device for δ ≥ 0 blocks, [N, K]."""
        time = self.per_block[row] * blocks + self.lead[row]
        return np.maximum(time, self.hop[row]) if self.overlapping else time

    def sufficient_rows(self) -> Ints:
        """Return the rows in which all devices together can hold the model."""
        return np.flatnonzero(self.caps.sum(axis=1) >= self.num_blocks)

    def threshold_range(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return the interval of the smallest feasible thresholds of sufficient rows, [N] each.

        For every S, no threshold below the lower end is feasible. At the upper end every S is
        feasible that is feasible at all.
        """
        caps, per_block, lead = self.caps[rows], self.per_block[rows], self.lead[rows]
        usable = caps > 0
        speed = np.where(usable, 1 / per_block, 0).sum(axis=1)
        least_lead = np.where(usable, lead, np.inf).min(axis=1)
        one = self.bottleneck(rows, np.ones_like(caps))
        low = np.maximum(
            np.where(usable, one, np.inf).min(axis=1), least_lead + self.num_blocks / speed
        )
        most = self.bottleneck(rows, caps)
        every = np.where(usable, most, 0).max(axis=1)
        alone = np.where(caps >= self.num_blocks, most, np.inf).min(axis=1)
        high = np.minimum(every, alone)
        # A chunk equal to the lower end must be inside the interval.
        return np.minimum(low, high) * (1 - PROGRESS), high


def batch_seconds(
    total: Floats, slowest: Floats, row: Ints, activation_s: Floats | float
) -> Floats:
    """Return Σ + A + (m - 1)·max(M, A), s, for Σ ``total``, M ``slowest`` and m - 1 ``row``,
    broadcast."""
    each = activation_s / (row + 1)
    waited = np.where(row > 0, slowest, 0.0)  # which may be infinite
    return np.asarray(total + each + row * np.maximum(waited, each))


def segments_needed(blocks: Floats, num_blocks: int) -> Ints:
    """Return the fewest devices that together hold L of the blocks [N, K]; K + 1 if all devices do
    not suffice, [N]."""
    smallest = np.cumsum(np.sort(blocks, axis=1), axis=1)
    spare = smallest[:, -1:] - num_blocks
    needed: Ints = blocks.shape[1] - (smallest <= spare).sum(axis=1) + (spare[:, 0] < 0)
    return needed
