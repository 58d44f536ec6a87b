"""The costs of all stages of a cluster for some numbers of micro-batches.

A device that has the choice recomputes only if its rows or blocks do not fit otherwise. So its time
still grows with its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapipe.state import DeviceProfile
from optim.problem import Bools, ClusterProblem, Floats, Ints
from optim.sharing.caps import Caps
from optim.sharing.states import States


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of a stage of each set of devices at each place from the end of the pipeline before
    a stage of each class, [P, C, N, D] for D numbers of blocks, or [R, P, C, N, D] for R numbers of
    micro-batches; infinite if the set cannot hold the stage. The last place stands for all before
    it, too."""

    once: Floats  # compute, hop and sync, s; under ``bound`` the sync alone
    pace: Floats  # between two micro-batches, s
    least: Floats  # a lower bound of the pace with other rows, s

    def of(self, place: int | slice | Ints) -> "Costs":
        """Return the costs for some of several m, if their first axis is m."""
        return Costs(self.once[place], self.pace[place], self.least[place])


@dataclass(frozen=True, slots=True)
class Tables:
    """The times of devices from which those of all sets are made."""

    states: States
    caps: Sequence[Caps]  # at each place
    rows: Ints  # n, [M]
    times: Floats  # and paces with rows of a shared stage, [C, D, 1 or 2, 2, T, n]: ``_of_rows``
    alone: Floats  # costs of stages on one device, [3, M, P, C, T, L]
    sync: Floats  # s, [N, L]
    bound: bool  # the law

    @classmethod
    def of(
        cls,
        problem: ClusterProblem,
        states: States,
        by_next_class: Sequence[ClusterProblem],
        kinds: Sequence[Sequence[int]],
        caps: Sequence[Caps],
    ) -> "Tables":
        """Return the tables; ``by_next_class`` are the problems before a stage of each class,
        ``caps`` of each place from the end."""
        by_next_class = [replace(each, devices=_first(each, kinds)) for each in by_next_class]
        most = problem.max_micro_batches, problem.num_blocks, problem.batch_size
        counts, blocks, rows = (np.arange(1, each + 1) for each in most)
        alone = [
            [
                _alone(each, own.blocks[number], counts, blocks)
                for number, each in enumerate(by_next_class)
            ]
            for own in caps
        ]
        return cls(
            states,
            caps,
            -(-problem.batch_size // counts),
            np.moveaxis(np.array([_of_rows(each, blocks, rows) for each in by_next_class]), 3, 1),
            np.moveaxis(np.array(alone)[..., states.first[states.alone], :], (0, 1), (2, 3)),
            _syncs(_first(problem, kinds), states)[:, None] * blocks,
            problem.latency == "bound",
        )

    def costs(
        self,
        counts: Ints,
        blocks: Ints,
        thresholds: Floats | float = np.inf,
        wanted: Bools | None = None,
    ) -> Costs:
        """Return the costs of stages of ``blocks`` [D] blocks for m of ``counts`` [R], [R, P, C, N,
        D]. Those that are not ``wanted``, [R, N, D], may be infinite.

        A device that shares a stage has no more rows than its pace allows within the threshold, [R]
        s, so that ``once`` is the least of all rows with such a pace.
        """
        costs, shares = self._alone(counts, blocks), self.states.counts.sum(axis=1) > 1
        shape = len(counts), len(shares), len(blocks)
        wanted = shares[:, None] & (np.full(shape, True) if wanted is None else wanted)
        own = [np.flatnonzero(wanted.any(axis=axes)) for axes in ((1, 2), (0, 1), (0, 2))]
        (row, held, group), wanted = own, wanted.swapaxes(1, 2)
        limits = np.broadcast_to(thresholds, counts.shape)[row]
        for place, caps in enumerate(self.caps if len(row) else ()):
            if caps.rows.any():
                arguments = counts[row], blocks[held], group, limits, wanted[np.ix_(*own)]
                found = np.moveaxis(self._shared(caps, *arguments), (0, 2), (3, 4))
                places = row[:, None, None], group[:, None], held
                np.moveaxis(costs[:, :, place], (0, 2), (3, 4))[places] = found
        return Costs(*costs)

    def least(self, counts: Ints, blocks: Ints, rates: Floats, paces: Floats) -> Costs:
        """Return lower bounds of ``costs`` without balancing rows: a set takes at least n·δ rows
        times blocks over the sum of its devices' rates. Stages of one device are exact. The rates
        are those of the first device of each kind, [M, T, L]: by compute and hop, and by the
        pace."""
        costs, work = self._alone(counts, blocks), self.rows[counts - 1][:, None, None] * blocks
        shares, held = self.states.counts.sum(axis=1) > 1, self.states.counts
        with np.errstate(divide="ignore", invalid="ignore"):
            once, pace = (
                work / (held @ each[counts - 1][..., blocks - 1]) for each in (rates, paces)
            )
        once = np.where(self.bound, 0.0, once) + self.sync[:, blocks - 1]
        shared = np.array([once, pace, pace])[:, :, None, None]
        return Costs(*np.where(shares[:, None], shared, costs))

    def _alone(self, counts: Ints, blocks: Ints) -> Floats:
        """Return the costs of stages on one device, [3, R, P, C, N, D]; others are infinite."""
        places, classes = self.alone.shape[2:4]
        shape = len(counts), places, classes, len(self.states.counts), len(blocks)
        costs = np.full((3, *shape), np.inf)
        costs[..., self.states.alone, :] = self.alone[:, counts - 1][..., blocks - 1]
        return costs

    def _shared(
        self,
        caps: Caps,
        counts: Ints,
        blocks: Ints,
        group: Ints,
        thresholds: Floats,
        wanted: Bools,
    ) -> Floats:
        """Return the costs of stages that these sets [N] share, [3, R, C, N, D], if they are
        ``wanted``, [R, D, N]; equal ones of several m are computed once."""
        most = caps.rows[..., counts - 1, :][..., blocks - 1].transpose(4, 0, 3, 5, 2, 1)
        shape, most = most.shape[:2], most.reshape(-1, *most.shape[2:])
        next_class, rows = np.tile(np.arange(shape[1]), shape[0]), self.rows[counts - 1]
        rows, limits = np.repeat(rows, shape[1]), np.repeat(thresholds, shape[1])
        first, of_most = dict[tuple[Any, ...], int](), (each.tobytes() for each in most)
        keys = zip(next_class.tolist(), rows.tolist(), limits.tolist(), of_most, strict=True)
        same = [first.setdefault(key, len(first)) for key in keys]
        own = np.unique(same, return_index=True)[1]
        needed = np.zeros((len(own), *wanted.shape[1:]), bool)
        np.logical_or.at(needed, same, np.repeat(wanted, shape[1], axis=0))
        found = np.empty((3, len(own), len(blocks), len(group)))
        sizes = np.frexp(rows[own] - 1)[1] // 2
        for size in set(sizes.tolist()):  # of about as many rows together
            near = np.flatnonzero(sizes == size)
            of = own[near]
            arguments = next_class[of], rows[of], limits[of], most[of], blocks, group, needed[near]
            found[:, near] = self._of_sets(*arguments)
        shared = found[:, same].swapaxes(2, 3)
        shared[0] = np.where(self.bound & np.isfinite(shared[0]), 0.0, shared[0])
        shared[0] += self.sync[group[:, None], blocks - 1]
        shared[:, self.states.counts[group].sum(axis=1) > rows[:, None]] = np.inf
        return shared.reshape(3, *shape, *shared.shape[2:])

    def _of_sets(
        self,
        next_class: Ints,
        rows: Ints,
        limits: Floats,
        most: Ints,
        blocks: Ints,
        group: Ints,
        wanted: Bools,
    ) -> Floats:
        """Return times of ``wanted`` sets, [R, D, N], for each next class [R], its number of rows
        [R], its threshold [R] and its caps [R, K - 1, D, 2, T], [3, R, D, N]."""
        counts = self.states.counts[group]
        others, given = counts.sum(axis=1) - 2, np.arange(1, rows.max() + 1)
        # most caps are often equal to those of two devices
        differ = (most != most[:, :1]).any(axis=(3, 4))[:, others].swapaxes(1, 2)
        others = np.where(wanted, differ * others, -1)
        found = np.full((3, *others.shape), np.inf)
        for each_others in range(others.max() + 1):
            of_sets = others == each_others
            row, held = of_sets.any(axis=2).nonzero()
            if len(row):
                own = np.flatnonzero(of_sets.any(axis=(0, 1)))
                plain, either = np.moveaxis(most[row, each_others, held], 1, 0)[:, :, None, :, None]
                times = self.times[next_class[row], blocks[held] - 1][..., : len(given)]
                each = np.where(given <= plain, times[:, 0], times[:, -1])  # and paces
                within = each[:, 1:] <= limits[row, None, None, None]
                each = np.where((given <= either) & within, each, np.inf)
                taken = _balanced(each.swapaxes(0, 1), counts[own], rows[row])
                places = row[:, None], held[:, None], own
                found[:, *places] = np.where(of_sets[places], taken, found[:, *places])
        return found

    def paces(self, counts: Ints, blocks: Ints) -> tuple[Ints, Floats]:
        """Return the paces, s, that devices with rows of a shared stage may have for each m of
        ``counts``, and the places of their m in it."""
        rows, times = self.rows[counts - 1], self.times[:, blocks - 1, :, 1]
        of, others = np.nonzero(np.arange(rows.max()) < rows[:, None] - 1)  # another has a row
        paces = times.reshape(-1, times.shape[-1])[:, others]
        return np.repeat(of, len(paces)), paces.T.ravel()


def _first(problem: ClusterProblem, kinds: Sequence[Sequence[int]]) -> tuple[DeviceProfile, ...]:
    """Return the first device of each kind."""
    return tuple(problem.devices[own[0]] for own in kinds)


def _of_rows(problem: ClusterProblem, blocks: Ints, rows: NDArray[Any]) -> Floats:
    """Return a device's time and pace of each kind for ``rows`` [n] rows without recomputing, and
    with it if a device may, [1 or 2, 2, D, T, n]."""
    may, found = any(each.recomputing for each in problem.devices), list[list[Floats]]()
    for recomputes in (False, True) if may else (False,):
        laws = [each.in_mode(recomputes).time for each in problem.devices]
        u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T[..., None]
        compute = blocks[:, None, None] * (u * rows + v)
        hop = np.broadcast_to(w * rows + ell, compute.shape)
        once = compute + hop
        pace = np.maximum(compute, hop) if problem.latency == "overlap" else once
        found.append([once, pace])
    return np.array(found)


def _balanced(times: Floats, counts: Ints, rows: Ints) -> Floats:
    """Give each row to the device that is then done first, of several to that with the least pace.

    The time of a set is the n-th smallest of its devices' times, and its pace the largest of their
    paces at these rows, n of ``rows`` [D]; ``times`` are both, [2, D, T, ≥ n]. Returns time and
    pace, and a lower bound of the pace with other rows, [3, D, N].
    """
    (done, longest), (sizes, kinds, most) = times, times.shape[1:]
    flat = done.reshape(sizes, -1)
    order = np.lexsort((longest.reshape(sizes, -1), flat))
    ascending = np.take_along_axis(flat, order, axis=1)
    # how many rows each kind has taken within each time, [D, T, T·n]
    taken = np.cumsum(order[:, None] // most == np.arange(kinds)[:, None], axis=2, dtype=np.float32)
    enough = counts.astype(np.float32) @ taken >= rows[:, None, None]  # [D, N, T·n]
    place = enough.argmax(axis=2)  # 0 if there are never enough, or for the empty set
    places = np.arange(sizes)[:, None]
    fits = enough[places, np.arange(len(counts)), place]
    once = np.where(fits, ascending[places, place], np.inf)
    kind = np.arange(kinds)[:, None, None]
    own = taken.swapaxes(0, 1)[:, places, place].astype(int)  # rows of a device, [T, D, N]
    last = order[places, place] // most == kind
    held = counts.T[:, None] > 0

    def paces(rows: Ints) -> Floats:
        return np.asarray(longest[places, kind, np.minimum(np.maximum(rows - 1, 0), most - 1)])

    pace = np.where((own > 0) & held, paces(own), 0.0).max(axis=0)
    # With other rows a device has more: of the last kind, as many as another one, of others one.
    more = np.where(held, paces(own + ~last), np.inf).min(axis=0)
    pace, least = np.where(np.isfinite(once), (pace, np.minimum(pace, more)), np.inf)
    return np.array([once, pace, least])


def _alone(problem: ClusterProblem, caps: Ints, counts: Ints, blocks: Ints) -> Floats:
    """Return the costs of stages on one device of each kind, [3, R, T, D], as without sharing.
    ``caps`` are [2, R, T]."""
    times = _of_rows(problem, blocks, problem.batch_size / counts).transpose(0, 1, 4, 3, 2)
    plain, either = caps[..., None] >= blocks
    once, pace = np.where(either, np.where(plain, times[0], times[-1]), np.inf)
    if problem.latency == "bound":
        once = np.where(either, 0.0, np.inf)
    return np.array([once, pace, pace])


def _syncs(devices: Sequence[DeviceProfile], states: States) -> Floats:
    """Return the seconds of a block's sync in each set, [N], for devices of each kind; infinite if
    one shares none."""
    laws = [[each.before((), members=[to.name]).sharing for to in devices] for each in devices]
    each = np.array([[np.inf if law is None else law.sync_s for law in own] for own in laws])
    number, held = np.maximum(states.counts.sum(axis=1), 1), states.counts > 0
    pairs = held[:, :, None] & held[:, None, :]
    kinds = np.arange(len(devices))
    pairs[:, kinds, kinds] = states.counts > 1
    slowest = np.where(pairs, each, 0.0).max(axis=(1, 2))
    return np.asarray(2 * (number - 1) / number * np.where(number > 1, slowest, 0.0))
