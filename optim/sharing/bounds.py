"""Lower bounds of plans with stages on any devices, for each number of micro-batches.

Every device is relaxed to hold any number of blocks and rows within its limits on its own: the rows
of all blocks, n·L of them, must be done somewhere.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from optim.latency import block_caps, micro_batch_sizes
from optim.partition.rates import TINY_S, batch_seconds
from optim.problem import Bools, ClusterProblem, Floats, Ints
from optim.sharing.law import largest_rows, row_caps
from optim.sharing.modes import relaxed

_HALVINGS = 10  # of the interval that contains the smallest pace


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a micro-batch's times, s, [M]; infinite if the devices cannot hold the model."""

    pace: Floats  # of M
    once: Floats  # of Σ with one stage; with a sync if the plans share
    several: Floats  # of Σ with two stages or more; with a sync if the plans share
    longest: Floats  # no stage has a larger pace
    rates: Floats  # most rows times blocks a second of each device, [M, K, L], by compute and hop
    paces: Floats  # the same by the pace alone, which is the longer of both under ``overlap``


def stage_bounds(problem: ClusterProblem, shares: bool = True) -> Bounds:
    """Return the bounds for m = 1 … M of plans with a shared stage, or of all plans if not
    ``shares``. Only the former include a sync.

    Stage s with devices of rates r_k takes at least n·δ_s/Σr_k seconds. With Σ over all devices R,
    the sum over stages is at least n·(Σ√δ_s)²/R (Cauchy-Schwarz), smallest for stages as uneven as
    the largest one, of D blocks, allows.
    """
    choices = _Choices.of(problem)
    rows, num_blocks = choices.rows, problem.num_blocks
    of_blocks, paces = choices.rates()
    rates, of_all = of_blocks.max(axis=2).sum(axis=1), of_blocks[:, :, -1].sum(axis=1)
    most = np.where(choices.held, np.arange(1, num_blocks + 1), 0).max(axis=1)
    sync_s = _least_sync(problem) if shares else 0.0
    with np.errstate(divide="ignore"):
        once = np.where(most >= num_blocks, rows * num_blocks / of_all, np.inf)
        several = rows * least_roots(np.array(num_blocks), np.minimum(most, num_blocks - 1)) / rates
    longest = choices.longest()
    least = rows * num_blocks / np.maximum(paces.max(axis=2).sum(axis=1), TINY_S)
    pace = choices.least_pace(num_blocks, np.minimum(least, longest), longest)
    if problem.latency == "bound":
        once, several = pace, 2 * pace
    return Bounds(pace, once + num_blocks * sync_s, several + sync_s, longest, of_blocks, paces)


def of_batch_s(problem: ClusterProblem, bounds: Bounds, once: Floats) -> Floats:
    """Return lower bounds of a batch's seconds for the first uplink time, with those of Σ
    ``once``, [M]; infinite for an m that the devices cannot hold."""
    counts = np.arange(1, problem.max_micro_batches + 1)
    later_s = np.array([problem.head_s, problem.gradient_s])[:, None] / counts
    total, slowest = once + later_s.sum(axis=0), np.maximum(bounds.pace, later_s.max(axis=0))
    fits, found = np.isfinite(total) & np.isfinite(slowest), np.full(len(counts), np.inf)
    of_fits = total[fits], slowest[fits], counts[fits] - 1
    found[fits] = batch_seconds(*of_fits, problem.activation_s[0])
    return found


@lru_cache(maxsize=2**15)  # enough for two runs of 10,000 units: each round asks again
def least_batch_s(problem: ClusterProblem) -> float:
    """Return a lower bound of a batch's seconds by any plan, for the first uplink time; infinite if
    the devices cannot hold the model."""
    bounds = stage_bounds(relaxed(problem), shares=False)
    return float(of_batch_s(problem, bounds, np.minimum(bounds.once, bounds.several)).min())


def _least_sync(problem: ClusterProblem) -> float:
    """Return the least seconds in which two devices add a block's gradients; infinite if no two
    devices share a stage."""
    laws = (device.sharing for device in problem.devices)
    return sorted([*(law.sync_s for law in laws if law), math.inf, math.inf])[1]


def least_roots(num_blocks: Ints, most: Ints) -> Floats:
    """Return the least (Σ√δ)² of stages with 1 … ``most`` blocks that hold ``num_blocks`` in all,
    broadcast; infinite if ``most`` is 0 and there are blocks."""
    full, rest = np.divmod(num_blocks, np.maximum(most, 1))
    roots = (full * np.sqrt(most) + np.sqrt(rest)) ** 2
    return np.asarray(np.where((most == 0) & (num_blocks > 0), np.inf, roots))


@dataclass(frozen=True, slots=True)
class _Choices:
    """What each device may hold for each m and δ: [M, K, L]."""

    rows: Ints  # n, [M]
    caps: Ints  # rows in a shared stage
    alone: Floats  # seconds of a micro-batch on the device alone; infinite if it does not fit
    alone_pace: Floats
    laws: Floats  # u, v, w, ℓ, each [K, 1]
    overlap: bool

    @classmethod
    def of(cls, problem: ClusterProblem) -> "_Choices":
        counts = range(1, problem.max_micro_batches + 1)
        rows = np.array([largest_rows(problem, m) for m in counts])
        # caps of two devices, because more devices have no larger ones
        caps = np.array([row_caps(problem, each, 2)[0] for each in problem.devices])
        caps = caps.swapaxes(0, 1)
        laws = [(d.time.u, d.time.v, d.time.w, d.time.ell) for d in problem.devices]
        u, v, w, ell = each = np.array(laws, dtype=float).T[:, :, None]
        np.maximum(u, TINY_S, out=u)  # times are divided by it
        blocks = np.arange(1, problem.num_blocks + 1)
        sizes = micro_batch_sizes(problem)[:, None, None]
        compute, hop = blocks * (u * sizes + v), w * sizes + ell
        overlap, fits = problem.latency == "overlap", block_caps(problem)[:, :, None] >= blocks
        pace = np.maximum(compute, hop) if overlap else compute + hop
        alone, pace = (np.where(fits, each_s, np.inf) for each_s in (compute + hop, pace))
        return cls(rows, caps, alone, pace, each, overlap)

    @property
    def held(self) -> Bools:
        """Whether all devices together can hold a stage, [M, L]."""
        shared = self.caps.sum(axis=1) >= self.rows[:, None]
        return np.asarray(shared | np.isfinite(self.alone).any(axis=1))

    def rates(self) -> tuple[Floats, Floats]:
        """Return the most rows times blocks a second of each device with δ blocks, by its time and
        its pace, [M, K, L]."""
        u, v, w, ell = self.laws
        blocks = np.arange(1, self.caps.shape[2] + 1)
        compute, hop = blocks * (self.caps * u + v), self.caps * w + ell
        compute = np.maximum(compute, TINY_S)
        pace = np.maximum(compute, hop) if self.overlap else compute + hop
        with np.errstate(divide="ignore", invalid="ignore"):
            time, longest = (
                np.maximum(
                    np.where(self.caps > 0, blocks * self.caps / shared, 0.0),
                    blocks * self.rows[:, None, None] / np.maximum(alone, TINY_S),
                )
                for shared, alone in ((compute + hop, self.alone), (pace, self.alone_pace))
            )
        return time, longest

    def longest(self) -> Floats:
        """Return a pace that no stage exceeds, [M]."""
        u, v, w, ell = self.laws
        blocks = np.arange(1, self.caps.shape[2] + 1)
        slowest = np.where(self.caps > 0, self.caps * (blocks * u + w) + blocks * v + ell, 0.0)
        alone = np.where(np.isfinite(self.alone_pace), self.alone_pace, 0.0)
        return np.asarray(np.maximum(alone, slowest).max(axis=(1, 2)))

    def least_pace(self, num_blocks: int, least: Floats, longest: Floats) -> Floats:
        """Return a pace below which the devices cannot compute all rows of all blocks, [M]."""
        needed, low, high = self.rows * num_blocks, least, longest
        caps = self.caps.astype(float)
        possible = self._within(high, caps) >= needed
        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            enough = self._within(middle, caps) >= needed
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(possible, low, np.inf)

    def _within(self, pace: Floats, caps: Floats) -> Floats:
        """Return the rows times blocks that the devices can compute within the pace, [M]."""
        u, v, w, ell = self.laws
        # rounding must not take the last row away
        each, blocks = (pace * (1 + 1e-12))[:, None, None], np.arange(1, caps.shape[2] + 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.overlap:
                rows = (each / blocks - v) / u
                np.minimum(rows, np.where(w > 0, (each - ell) / w, np.inf), out=rows)
                rows = np.where(each >= ell, rows, 0.0)
            else:
                rows = (each - blocks * v - ell) / (blocks * u + w)
            rows *= 1 + 1e-9
        np.minimum(np.maximum(rows, 0.0, out=rows), caps, out=rows)
        np.floor(rows + 1e-9, out=rows)
        rows = np.where(self.alone_pace <= each, self.rows[:, None, None], rows)
        return np.asarray((blocks * rows).max(axis=2).sum(axis=1))
