"""The stages that several devices can share, independently of the solver."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from optim.problem import ClusterProblem, Floats, Ints
from optim.verify.limits import possible_rows

_MOST_CELLS = 2**20  # of an array


@dataclass(frozen=True, slots=True)
class Groups:
    """G stages of sets of devices that may share one, for R values of m and 1 … L blocks.

    A set has several: the one with the least time, then that with the least time of smaller pace,
    and so on. Any other rows of its devices have no smaller time and pace than one of these.
    Devices have the memory and times that ``optim.verify.witness`` counts.
    """

    sets: Ints  # bit k stands for device k, [G]
    seconds: Floats  # between two micro-batches, [R, G, L]; infinite without such a stage
    once: Floats  # compute and hop of a micro-batch, [R, G, L]
    sync: Floats  # after the batch, [G, L]

    @classmethod
    def of(cls, problem: ClusterProblem, counts: Ints) -> Iterator["Groups"]:
        """Yield the groups of two devices or more, a part at a time, for these values of m."""
        laws = [(k, law) for k, each in enumerate(problem.devices) if (law := each.sharing)]
        blocks = np.arange(1, problem.num_blocks + 1)
        for size in range(2, len(laws) + 1):
            each = max(1, _MOST_CELLS // (size * len(blocks) * problem.batch_size))
            groups = combinations(laws, size)
            while own := list(islice(groups, each)):
                devices = np.array([[k for k, _ in group] for group in own])
                sync_s = np.array([max(law.sync_s for _, law in group) for group in own])
                times = [_times(problem, devices, m) for m in counts.tolist()]
                most = max(map(len, times))
                padded = np.full((len(times), most, 2, len(own), len(blocks)), np.inf)
                for row, found in zip(padded, times, strict=True):
                    row[: len(found)] = found
                shape = len(times), most * len(own), len(blocks)
                seconds, once = (found.reshape(shape) for found in np.moveaxis(padded, 2, 0))
                sets, syncs = (1 << devices).sum(axis=1), 2 * (1 - 1 / size) * sync_s
                sync = np.tile(syncs, most)[:, None] * blocks
                yield cls(np.tile(sets, most), seconds, once, sync)


def _times(problem: ClusterProblem, groups: Ints, m: int) -> Floats:
    """Return the seconds between two micro-batches and of one of all stages of these groups,
    [G, g], of ever smaller pace, [Q, 2, G, L]."""
    all_rows, size = -(-problem.batch_size // m), groups.shape[1]
    most = max(all_rows + 1 - size, 0)  # every other device has a row
    rows, blocks = np.arange(1, most + 1), np.arange(1, problem.num_blocks + 1)[:, None]
    laws = [device.time for device in problem.devices]
    compute = np.array([blocks * (law.u * rows + law.v) for law in laws])  # [K, L, rows]
    hop = np.array([np.broadcast_to(law.w * rows + law.ell, compute[0].shape) for law in laws])
    pace = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
    fits = [possible_rows(problem, each, m, size)[:, :most] for each in problem.devices]
    # each row of each device, [G, L, rows], by the time at which it is done, then by pace
    done, paces = (
        each[groups].swapaxes(1, 2).reshape(len(groups), len(blocks), -1)
        for each in (np.where(fits, compute + hop, np.inf), pace)
    )
    order = np.lexsort((paces, done))
    done, paces = (np.take_along_axis(each, order, axis=2) for each in (done, paces))
    within, found = np.isfinite(done), list[Floats]()
    while True:
        taken = within & (within.cumsum(axis=2) <= all_rows)
        enough = taken.sum(axis=2) == all_rows
        seconds, once = (
            np.where(enough, np.max(each, axis=2, where=taken, initial=0.0), np.inf)
            for each in (paces, done)
        )
        if found and not enough.any():
            return np.array(found)
        found.append(np.array([seconds, once]))
        within &= paces < seconds[..., None]
