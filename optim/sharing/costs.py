"""The costs of all stages of a cluster for one number of micro-batches.

A device that has the choice recomputes only if its rows or blocks do not fit otherwise. So its time
still grows with its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.latency import block_caps
from optim.problem import Bools, ClusterProblem, Floats, Ints
from optim.sharing.law import largest_rows, row_caps
from optim.sharing.modes import in_modes
from optim.sharing.states import States


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of a stage of each set of devices at each place from the end of the pipeline before
    a stage of each class, [P, C, N, D] for D numbers of blocks; infinite if the set cannot hold the
    stage. The last place stands for all before it, too."""

    once: Floats  # compute, hop and sync, s; under ``bound`` the sync alone
    pace: Floats  # between two micro-batches, s
    least: Floats  # a lower bound of the pace with other rows, s


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device of each kind can hold: without recomputing, and in either way."""

    rows: Ints  # of a stage that g = 2 … K devices share, [T, 2, K - 1, M, L]
    blocks: Ints  # of a stage of its own before one of each class, [C, 2, M, T]

    @classmethod
    def of(cls, problem: ClusterProblem, kinds: Sequence[Sequence[int]]) -> "Caps":
        """Return the caps of the first device of each kind."""
        behind, most = _by_class(problem, kinds), np.maximum.accumulate
        ways, first = ((), range(len(kinds))), behind[-1].devices
        rows = [[row_caps(problem, each.in_mode(on)) for on in (False, True)] for each in first]
        blocks = [[block_caps(in_modes(each, on)) for on in ways] for each in behind]
        return cls(most(np.array(rows), axis=1), most(np.array(blocks), axis=1))

    @property
    def chosen(self) -> bool:
        """Whether a device can hold more if it recomputes."""
        return bool((self.rows[:, 0] < self.rows[:, 1]).any() or np.ptp(self.blocks, axis=1).any())

    def same(self, other: "Caps") -> bool:
        """Whether both have the same caps."""
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.blocks, other.blocks)

    def of_groups(self, states: States, m: int, most: int) -> list[tuple[int, Ints]]:
        """Return the numbers of the sets of at most ``most`` devices that share a stage, by the
        place g - 2 of their caps."""
        places, rows = states.counts.sum(axis=1) - 2, self.rows[..., m - 1, :]
        if (rows == rows[:, :, :1]).all():
            places = np.minimum(places, 0)
        places[states.counts.sum(axis=1) > most] = -1
        return [(each, np.flatnonzero(places == each)) for each in range(places.max() + 1)]


def stage_costs(
    problem: ClusterProblem,
    states: States,
    kinds: Sequence[Sequence[int]],
    caps: Sequence[Caps],
    m: int,
    blocks: Ints,
    threshold: float = np.inf,
    wanted: Bools | None = None,
) -> Costs:
    """Return the costs of stages of ``blocks`` [D] blocks; ``caps`` are those of each place. Those
    that are not ``wanted``, [N, D], may be infinite.

    A device that shares a stage has no more rows than its pace allows within the ``threshold``, so
    that ``once`` is the least of all rows with such a pace.
    """
    rows = np.arange(1, largest_rows(problem, m) + 1)
    behind, bound = _by_class(problem, kinds), problem.latency == "bound"
    costs = np.full((3, len(caps), len(behind), len(states.counts), len(blocks)), np.inf)
    wanted = np.full(costs.shape[3:], True) if wanted is None else wanted
    sets, held = wanted.max(axis=1), np.flatnonzero(wanted.any(axis=0))
    blocks = blocks[held]
    fast, slow = (_of_rows(behind[-1], blocks, rows, on) for on in (False, True))
    sync = _syncs(behind[-1], states)[:, None] * blocks
    single = np.flatnonzero(states.alone)
    for place, own in enumerate(caps):
        for others, every in own.of_groups(states, m, len(rows)) if own.rows.any() else ():
            number = every[sets[every]]
            most = own.rows[:, :, others, m - 1, blocks - 1].swapaxes(0, 2)[..., None]
            plain, either = rows <= most[:, 0], rows <= most[:, 1]
            times = np.where(plain, fast, slow)  # and paces
            times = np.where(either & (times[1] <= threshold), times, np.inf)
            shared = _shared(times, states.counts[number], len(rows))
            shared[0] = np.where(bound & np.isfinite(shared[0]), 0.0, shared[0]) + sync[number]
            costs[:, place][:, :, number[:, None], held] = shared[:, None]
        for each, hops in enumerate(behind):
            alone = _alone(hops, own.blocks[each, :, m - 1], m, blocks)[:, states.first[single]]
            costs[:, place, each][:, single[:, None], held] = alone
    return Costs(*costs)


def device_paces(
    problem: ClusterProblem, kinds: Sequence[Sequence[int]], m: int, blocks: Ints
) -> Floats:
    """Return the paces, s, that devices with rows of a shared stage may have, ascending."""
    rows, usual = np.arange(1, largest_rows(problem, m)), _by_class(problem, kinds)[-1]
    return np.unique([_of_rows(usual, blocks, rows, on)[1] for on in (False, True)])


def _by_class(problem: ClusterProblem, kinds: Sequence[Sequence[int]]) -> list[ClusterProblem]:
    """Return the problem of the first device of each kind, with the hops of stages of one device
    before a stage of each class; the last problem has the usual hops."""
    first = [problem.devices[own[0]] for own in kinds]
    names = [*(each.name for each in first), None] if problem.linked else [None]
    hops = (tuple(each.before(name) for each in first) for name in names)
    return [replace(problem, devices=own) for own in hops]


def _of_rows(problem: ClusterProblem, blocks: Ints, rows: NDArray[Any], recomputes: bool) -> Floats:
    """Return a device's time and pace of each kind for ``rows`` [n] rows, [2, D, T, n]."""
    laws = [each.in_mode(recomputes).time for each in problem.devices]
    u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T[..., None]
    compute = blocks[:, None, None] * (u * rows + v)
    hop = np.broadcast_to(w * rows + ell, compute.shape)
    once = compute + hop
    return np.array([once, np.maximum(compute, hop) if problem.latency == "overlap" else once])


def _shared(times: Floats, counts: Ints, rows: int) -> Floats:
    """Give each row to the device that is then done first, of several to that with the least pace.

    The time of a set is the n-th smallest of its devices' times, and its pace the largest of their
    paces at these rows; ``times`` are both, [2, D, T, n]. Returns time and pace, and a lower bound
    of the pace with other rows, [3, N, D].
    """
    (done, longest), (sizes, kinds, most) = times, times.shape[1:]
    flat = done.reshape(sizes, -1)
    order = np.lexsort((longest.reshape(sizes, -1), flat))
    ascending = np.take_along_axis(flat, order, axis=1)
    # how many rows each kind has taken within each time, [D, T, T·n]
    taken = np.cumsum(order[:, None] // most == np.arange(kinds)[:, None], axis=2, dtype=np.float32)
    enough = counts.astype(np.float32) @ taken >= rows  # [D, N, T·n]
    place = enough.argmax(axis=2)  # 0 if there are never enough, or for the empty set
    places = np.arange(sizes)[:, None]
    fits = enough[places, np.arange(len(counts)), place]
    once = np.where(fits, ascending[places, place], np.inf)
    own = taken.swapaxes(1, 2)[places, place].astype(int)  # rows of a device, [D, N, T]
    last = (order[places, place] // most)[..., None] == np.arange(kinds)

    def paces(rows: Ints) -> Floats:
        each = np.clip(rows - 1, 0, most - 1).swapaxes(1, 2)
        return np.take_along_axis(longest, each, axis=2).swapaxes(1, 2)

    pace = np.where((own > 0) & (counts > 0), paces(own), 0.0).max(axis=2)
    # With other rows a device has more: of the last kind, as many as another one, of others one.
    more = np.where(counts > 0, paces(own + ~last), np.inf).min(axis=2)
    pace, least = np.where(np.isfinite(once), (pace, np.minimum(pace, more)), np.inf)
    return np.array([once, pace, least]).swapaxes(1, 2)


def _alone(problem: ClusterProblem, caps: Ints, m: int, blocks: Ints) -> Floats:
    """Return the costs of stages on one device of each kind, [3, T, D], as without sharing.
    ``caps`` are [2, T]."""
    size = np.array([problem.batch_size / m])
    fast, slow = (
        _of_rows(problem, blocks, size, on)[..., 0].swapaxes(1, 2) for on in (False, True)
    )
    plain, either = caps[..., None] >= blocks
    once, pace = np.where(either, np.where(plain, fast, slow), np.inf)
    if problem.latency == "bound":
        once = np.where(either, 0.0, np.inf)
    return np.array([once, pace, pace])


def _syncs(problem: ClusterProblem, states: States) -> Floats:
    """Return the seconds of a block's sync in each set, [N]; infinite if a device shares none."""
    laws = [device.sharing for device in problem.devices]
    each = np.array([np.inf if law is None else law.sync_s for law in laws])
    number = np.maximum(states.counts.sum(axis=1), 1)
    slowest = np.where(states.counts > 0, each, 0.0).max(axis=1)
    return np.asarray(2 * (number - 1) / number * np.where(number > 1, slowest, 0.0))
