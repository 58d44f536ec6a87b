"""The stages that several devices can share, independently of the solver."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from optim.problem import ClusterProblem, Floats, Ints
from optim.verify.limits import possible_rows


@dataclass(frozen=True, slots=True)
class Groups:
    """The stages of each set of G devices that may share one, for R values of m and 1 … L blocks.

    Each row goes to the device that is then done first, of several to that with the least pace.
    Devices have the memory and times that ``optim.verify.witness`` counts.
    """

    sets: Ints  # bit k stands for device k, [G]
    seconds: Floats  # between two micro-batches, [R, G, L]; infinite if it cannot hold the stage
    once: Floats  # compute and hop of a micro-batch, [R, G, L]
    sync: Floats  # after the batch, [G, L]

    @classmethod
    def of(cls, problem: ClusterProblem, counts: Ints) -> "Groups":
        """Return the groups of two devices or more, for these values of m."""
        laws = {k: law for k, each in enumerate(problem.devices) if (law := each.sharing)}
        sizes = range(2, len(laws) + 1)
        groups = [own for size in sizes for own in combinations(laws, size)]
        blocks = np.arange(1, problem.num_blocks + 1)
        syncs = [2 * (1 - 1 / len(own)) * max(laws[k].sync_s for k in own) for own in groups]
        times = [_balanced(problem, groups, m) for m in counts.tolist()]
        return cls(
            np.array([sum(1 << k for k in own) for own in groups], dtype=np.int64),
            np.array([seconds for seconds, _ in times]),
            np.array([once for _, once in times]),
            np.array(syncs)[:, None] * blocks,
        )


def _balanced(
    problem: ClusterProblem, groups: list[tuple[int, ...]], m: int
) -> tuple[Floats, Floats]:
    """Return the seconds between two micro-batches of each group, and of one, [G, L] each."""
    all_rows = -(-problem.batch_size // m)
    rows, blocks = np.arange(1, all_rows + 1), np.arange(1, problem.num_blocks + 1)[:, None]
    found = np.full((2, len(groups), len(blocks)), np.inf)
    laws = [device.time for device in problem.devices]
    compute = np.array([blocks * (law.u * rows + law.v) for law in laws])  # [K, L, rows]
    hop = np.array([np.broadcast_to(law.w * rows + law.ell, compute[0].shape) for law in laws])
    pace = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
    done = dict[int, Floats]()  # by the number of devices that share the stage
    for size in {len(own) for own in groups}:
        fits = np.array([possible_rows(problem, each, m, size) for each in problem.devices])
        done[size] = np.where(fits, compute + hop, np.inf)
    for place, own in enumerate(groups):
        most = all_rows + 1 - len(own)  # every other device has a row
        if most * len(own) >= all_rows:
            times = done[len(own)][own, :, :most], pace[own, :, :most]
            found[:, place] = _of_group(*times, all_rows)
    return found[0], found[1]


def _of_group(done: Floats, pace: Floats, rows: int) -> tuple[Floats, Floats]:
    """Return the seconds between two micro-batches of ``rows`` rows, and of one, [L] each, if
    devices are ``done`` with 1, 2, … rows at these times, with this ``pace``, [g, L, most]."""
    flat, paces = (each.swapaxes(0, 1).reshape(done.shape[1], -1) for each in (done, pace))
    taken = np.lexsort((paces, flat))[:, :rows]
    last = np.take_along_axis(flat, taken[:, -1:], axis=1)[:, 0]
    seconds = np.take_along_axis(paces, taken, axis=1).max(axis=1)
    return np.where(np.isfinite(last), seconds, np.inf), last
