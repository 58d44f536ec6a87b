"""A witness of a cluster's lower bound: thresholds from which the bound follows without a search.

For each m, thresholds T_1 < … < T_n divide the time of the slowest stage into ranges, the first
from 0 and the last to infinity. In the range (T_i, T_i+1] the slowest stage takes at least τ, the
shortest stage above T_i that a device can have, and no device has a stage above T_i+1. A table over
devices and blocks gives Σ, the least sum of such stages that hold L blocks. No plan in this range
takes less than Σ + (m - 1)·τ, so the least of these values is a lower bound.

Each device has the memory of the last stage, recomputing or not, whichever is less. It does not
take the time of recomputing, and its hop is its fastest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from collapipe.plan import Certificate, Witness
from collapipe.state import AffineLaw, DeviceProfile, Link
from optim.problem import ClusterProblem, Floats, Ints
from optim.verify.limits import possible, possible_rows
from optim.verify.tolerance import exceeds, violation

_SAME = 1e-12  # stages with a smaller relative difference are equal
_LEAST_S = math.ulp(0.0)  # divides stages that take no time from all others
_MOST_CELLS, _MOST_OF_GROUPS = 2**22, 2**20  # cells of an array
_MOST_STAGES = 6 * 10**5  # of all m, pairs and numbers of blocks: about a second on one core


def check_witness(certificate: Certificate, problem: ClusterProblem) -> None:
    """Check that the certificate's witness proves its lower bound.

    Raises ``PlanViolationError`` with the range that does not.
    """
    witness, least_m = certificate.witness, problem.min_micro_batches
    if len(witness) != problem.max_micro_batches + 1 - least_m:
        raise violation("witness", f"{len(witness)} lists of thresholds, expected one for each m")
    for m, each in enumerate(witness, start=least_m):
        if not all(a < b for a, b in zip((0.0, *each), (*each, math.inf), strict=True)):
            raise violation("witness", f"the thresholds for m={m} do not ascend")
    row = np.repeat(np.arange(len(witness)), [len(each) + 1 for each in witness])
    low = np.array([edge for each in witness for edge in (0.0, *each)])
    high = np.array([edge for each in witness for edge in (*each, math.inf)])
    bounds = _Stages.of(problem, certificate.solver == "shared").bounds(row, low, high)
    worst = int(bounds.argmin())
    if exceeds(certificate.lower_bound, float(bounds[worst])):
        raise violation(
            "lower bound",
            f"{certificate.lower_bound:.12g} s, but the witness proves only {bounds[worst]:.12g} s "
            f"for m={row[worst] + least_m} and a slowest stage of {low[worst]:.12g} to "
            f"{high[worst]:.12g} s",
        )


def is_small(problem: ClusterProblem, shared: bool) -> bool:
    """Whether a witness takes little time."""
    # pairs of a set and a group, or devices, of which each takes as long as four pairs
    pairs = 3 ** len(problem.devices) if shared else 4 * len(problem.devices)
    counts = problem.max_micro_batches + 1 - problem.min_micro_batches
    return counts * pairs * problem.num_blocks <= _MOST_STAGES


def witness_of(problem: ClusterProblem, lower_bound: float, shared: bool = False) -> Witness | None:
    """Return a witness of this bound, of plans with ``shared`` stages or without; None if it cannot
    be proved.

    A range whose bound is too low is halved, until no other stage is between its ends.
    """
    stages = _Stages.of(problem, shared)
    times = (np.maximum(own[np.isfinite(own)], _LEAST_S) for own in stages.seconds)
    edges = [np.array([0.0, *np.unique(each)[:-1], math.inf]) for each in times]
    ranges = [(row, 0, len(own) - 1) for row, own in enumerate(edges)]
    cuts = [list[float]() for _ in edges]
    while ranges:
        low, high = np.array([(edges[row][i], edges[row][j]) for row, i, j in ranges]).T
        bounds = stages.bounds(np.array([row for row, _, _ in ranges]), low, high)
        too_low = [r for r, each in zip(ranges, bounds, strict=True) if exceeds(lower_bound, each)]
        ranges = []
        for row, first, last in too_low:
            if (middle := (first + last) // 2) == first:
                return None
            cuts[row].append(float(edges[row][middle]))
            ranges += [(row, first, middle), (row, middle, last)]
    return tuple(tuple(sorted(each)) for each in cuts)


@dataclass(frozen=True, slots=True)
class Groups:
    """G stages of sets of devices that may share one, for R values of m and 1 … L blocks.

    A set has several: the one with the least time, then that with the least time of smaller pace,
    and so on. Any other rows of its devices have no smaller time and pace than one of these.
    They are found independently of the solver. Devices have the memory and times that this module
    counts.
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
            each = max(1, _MOST_OF_GROUPS // (size * len(blocks) * problem.batch_size))
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


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a micro-batch that G sets of devices can have, for R values of m.

    Without shared stages each set is a device.
    """

    problem: ClusterProblem
    m: Ints  # [R]
    sets: Ints  # bit k stands for device k, [G]
    # that a stage of 1 … L blocks occupies its devices or links, [R, G, L]; infinite if memory or
    # energy do not allow it
    seconds: Floats
    once: Floats  # its compute and hop, [R, G, L]
    sync: Floats  # the time of adding its gradients after the batch, [G, L]

    @classmethod
    def of(cls, problem: ClusterProblem, shared: bool) -> "_Stages":
        m = np.arange(problem.min_micro_batches, problem.max_micro_batches + 1)
        laws = [device.time for device in problem.devices]
        links = [[(link.w, link.ell) for link in each.links] for each in problem.devices]
        hops = [[(law.w, law.ell), *own] for law, own in zip(laws, links, strict=True)]
        u, v = np.array([(law.u, law.v) for law in laws]).T[..., None]
        w, ell = np.array([np.min(each, axis=0) for each in hops]).T[..., None]
        size, blocks = problem.batch_size / m[:, None, None], np.arange(problem.num_blocks + 1)[1:]
        compute, hop = blocks * u * size + blocks * v, w * size + ell
        seconds = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
        seconds = np.where(possible(problem, place=1)[..., 1:], seconds, math.inf)
        several = list(Groups.of(problem, m)) if shared else []
        return cls(
            problem=problem,
            m=m,
            sets=np.concatenate([2 ** np.arange(len(laws)), *(each.sets for each in several)]),
            seconds=np.concatenate([seconds, *(each.seconds for each in several)], axis=1),
            once=np.concatenate([compute + hop, *(each.once for each in several)], axis=1),
            sync=np.concatenate([np.zeros(seconds.shape[1:]), *(each.sync for each in several)]),
        )

    def bounds(self, row: Ints, low: Floats, high: Floats) -> Floats:
        """Return a lower bound of a batch, s, for each range of the slowest stage, [N]."""
        each = max(1, _MOST_CELLS // self.seconds[0].size)
        parts = (slice(first, first + each) for first in range(0, len(row), each))
        return np.concatenate([self._bounds(row[own], low[own], high[own]) for own in parts])

    def _bounds(self, row: Ints, low: Floats, high: Floats) -> Floats:
        problem, m, own = self.problem, self.m[row], self.seconds[row]
        low = np.where(low > 0, low, -1.0)  # a stage may take no time
        above, within = (edge[:, None, None] * (1 + _SAME) for edge in (low, high))
        can = np.isfinite(own) & (own <= within)
        slowest = np.where(can & (own > above), own, math.inf).min(axis=(1, 2))
        empty = np.isinf(slowest)  # no plan is in the range
        slowest[empty] = 0.0
        # Under ``bound`` every stage takes as long as the slowest.
        once = slowest[:, None, None] if problem.latency == "bound" else self.once[row]
        cost = np.where(can, once + self.sync, math.inf)
        several = len(self.sets) > len(problem.devices)
        least = _least_of_sets(cost, self.sets) if several else _least_sums(cost)
        later_s, sent = (problem.head_s, problem.gradient_s), problem.activation_s[0] / m
        pace = np.maximum(slowest, np.maximum(max(later_s) / m, sent))
        seconds = least + sum(later_s) / m + sent + (m - 1) * pace
        return np.asarray(np.where(empty, math.inf, seconds))


def _least_sums(cost: Floats) -> Floats:
    """Return the least sum for L blocks, [N], of devices that each hold none or 1 … L blocks at
    these costs, [N, K, L]."""
    least = _no_stage(cost)
    for k in range(cost.shape[1]):
        least = np.minimum(least, _with_stage(least, cost[:, k]))
    return np.asarray(least[:, -1])


def _least_of_sets(cost: Floats, sets: Ints) -> Floats:
    """Return the same for sets of devices, [N, G, L], of which no device is in two."""
    order = np.argsort(sets, kind="stable")
    sets, starts = np.unique(sets[order], return_index=True)
    cost = np.minimum.reduceat(cost[:, order], starts, axis=1)  # of a set's stages
    costs = zip(sets.tolist(), np.ascontiguousarray(cost.swapaxes(0, 1)), strict=True)
    least, usable = [_no_stage(cost)], {own: each for own, each in costs if np.isfinite(each).any()}
    for among in range(1, int(np.bitwise_or.reduce(sets)) + 1):  # the devices that may be used
        first = among & -among
        best = least[among ^ first]  # without the first of them
        for group, each in usable.items():
            if group & first and group & among == group:
                best = np.minimum(best, _with_stage(least[among ^ group], each))
        least.append(best)
    return np.asarray(least[-1][:, -1])


def _no_stage(cost: Floats) -> Floats:
    """Return the least sums for 0 … L blocks before any stage, [N, L + 1]."""
    least = np.full((len(cost), cost.shape[2] + 1), math.inf)
    least[:, 0] = 0.0
    return least


def _with_stage(least: Floats, cost: Floats) -> Floats:
    """Return the least sums for 0 … L blocks, [N, L + 1], with one more stage of 1 … L blocks at
    these costs, [N, L]."""
    sums = np.full_like(least, math.inf)
    for blocks in range(1, least.shape[1]):
        more = least[:, :-blocks] + cost[:, blocks - 1, None]
        np.minimum(sums[:, blocks:], more, out=sums[:, blocks:])
    return sums
