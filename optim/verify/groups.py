"""The stages that several devices can share, independently of the solver."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from collapipe.state import AffineLaw, DeviceProfile, Link
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
        sharing = [k for k, each in enumerate(problem.devices) if each.sharing]
        blocks, each_s = np.arange(1, problem.num_blocks + 1), _syncs(problem.devices)
        for size in range(2, len(sharing) + 1):
            each = max(1, _MOST_CELLS // (size * len(blocks) * problem.batch_size))
            groups = combinations(sharing, size)
            while own := list(islice(groups, each)):
                devices = np.array(own)
                pairs = devices[:, :, None], devices[:, None, :]
                sync_s = np.where(np.eye(size, dtype=bool), 0.0, each_s[pairs]).max(axis=(1, 2))
                times = [_times(problem, devices, m) for m in counts.tolist()]
                most = max(map(len, times))
                padded = np.full((len(times), most, 2, len(own), len(blocks)), np.inf)
                for row, found in zip(padded, times, strict=True):
                    row[: len(found)] = found
                shape = len(times), most * len(own), len(blocks)
                seconds, once = (found.reshape(shape) for found in np.moveaxis(padded, 2, 0))
                sets, ring = (1 << devices).sum(axis=1), 2 * (1 - 1 / size)
                sync: Floats = np.tile(ring * sync_s, most)[:, None] * blocks
                yield cls(np.tile(sets, most), seconds, once, sync)


def _syncs(devices: Sequence[DeviceProfile]) -> Floats:
    """Return the seconds in which each device sends what trains in a block to each one, [K, K]."""
    found, place = list[list[float]](), {each.name: k for k, each in enumerate(devices)}
    for each in devices:
        found.append([each.sharing.sync_s if each.sharing else 0.0] * len(devices))
        for link in each.links:
            if link.sync_s is not None and link.to in place:
                found[-1][place[link.to]] = link.sync_s
    return np.array(found)


def _fastest_hop(device: DeviceProfile, rows: Ints) -> Floats:
    ways: tuple[AffineLaw | Link, ...] = (device.time, *device.links)
    return np.asarray(np.min([each.w * rows + each.ell for each in ways], axis=0))


def _times(problem: ClusterProblem, groups: Ints, m: int) -> Floats:
    """Return the seconds between two micro-batches and of one of all stages of these groups,
    [G, g], of ever smaller pace, [Q, 2, G, L]."""
    all_rows, size = -(-problem.batch_size // m), groups.shape[1]
    most = max(all_rows + 1 - size, 0)  # every other device has a row
    rows, blocks = np.arange(1, most + 1), np.arange(1, problem.num_blocks + 1)[:, None]
    laws = [device.time for device in problem.devices]
    compute = np.array([blocks * (law.u * rows + law.v) for law in laws])  # [K, L, rows]
    hops = np.array([_fastest_hop(each, rows) for each in problem.devices])
    hop = np.broadcast_to(hops[:, None], compute.shape)
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
