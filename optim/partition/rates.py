"""A cluster's costs as arrays, one row for each number of micro-batches."""

from dataclasses import dataclass, replace

import numpy as np

from optim.latency import block_caps, micro_batch_sizes
from optim.problem import ClusterProblem, Floats, Ints

# Times that differ by less, relatively, are one: a chunk is always within its own threshold.
SAME = 1e-13
# An incumbent has to be beaten by more than this, relatively.
PROGRESS = 1e-11


@dataclass(frozen=True, slots=True)
class Rates:
    """What blocks and hops cost; row m - 1 of each array is for m micro-batches.

    A device that holds δ blocks is a bottleneck of max(a·δ + lead, g) seconds per micro-batch.
    """

    per_block: Floats  # a = u·b̂ + v, s, [M, K], positive
    hop: Floats  # g = w·b̂ + ℓ, s, [M, K]
    lead: Floats  # g itself, or 0 under ``overlap``, where the hop goes on beside the compute
    caps: Floats  # blocks that memory and energy allow, [M, K]; whole numbers
    behind: Floats  # of a micro-batch in the stages behind the uplink, together, s, [M]
    floor: Floats  # and in the slowest of them
    num_blocks: int
    paced: bool  # law ``bound``: every stage takes as long as the slowest

    @classmethod
    def of(cls, problem: ClusterProblem) -> "Rates":
        """The problem's laws at b̂ = b/m."""
        laws = [device.time for device in problem.devices]
        u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T
        sizes = micro_batch_sizes(problem)[:, None]
        per_block, hop = u * sizes + v, w * sizes + ell
        # A block that takes no time would fit any number of times: the divisions need a positive a.
        per_block = np.maximum(per_block, 1e-200)
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
        """min(K, L)."""
        return min(int(self.caps.shape[1]), self.num_blocks)

    def held(self, row: Ints, threshold: Floats) -> Floats:
        """The most blocks of each device whose bottleneck is within the threshold, [N, K]."""
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
        """max(a·δ + lead, g) of each device, [N, K], as if it held δ ≥ 0 blocks."""
        time = self.per_block[row] * blocks + self.lead[row]
        return np.maximum(time, self.hop[row]) if self.overlapping else time

    def sufficient_rows(self) -> Ints:
        """The rows in which all devices together can hold the model."""
        return np.flatnonzero(self.caps.sum(axis=1) >= self.num_blocks)

    def threshold_range(self, rows: Ints) -> tuple[Floats, Floats]:
        """Where the smallest feasible thresholds of sufficient rows lie, whatever S, [N] each.

        Below the first none is feasible; at the second all are that are feasible at all.
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
        # A chunk that equals the first must lie above it.
        return np.minimum(low, high) * (1 - PROGRESS), high


def batch_seconds(
    total: Floats, slowest: Floats, row: Ints, activation_s: Floats | float
) -> Floats:
    """Σ + A + (m - 1)·max(M, A) for Σ ``total`` and M ``slowest``, s, broadcast with m - 1."""
    each = activation_s / (row + 1)
    return np.asarray(total + each + row * np.maximum(slowest, each))


def segments_needed(blocks: Floats, num_blocks: int) -> Ints:
    """The fewest devices that together hold L of the blocks [N, K]; K + 1 where all do not, [N]."""
    smallest = np.cumsum(np.sort(blocks, axis=1), axis=1)
    spare = smallest[:, -1:] - num_blocks
    needed: Ints = blocks.shape[1] - (smallest <= spare).sum(axis=1) + (spare[:, 0] < 0)
    return needed
