"""The costs of all stages of a cluster for one number of micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats, Ints
from optim.sharing.law import largest_rows, row_caps
from optim.sharing.states import States


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of a stage of each set of devices, [N, D] for D numbers of blocks; infinite if the
    set cannot hold the stage."""

    once: Floats  # compute, hop and sync, s; under ``bound`` the sync alone
    pace: Floats  # between two micro-batches, s


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device of each kind can hold."""

    rows: Ints  # of a stage that g = 2 … K devices share, [T, K - 1, M, L]
    blocks: Ints  # of a stage of its own, [M, T]

    @classmethod
    def of(cls, problem: ClusterProblem, kinds: Sequence[Sequence[int]]) -> "Caps":
        """Return the caps of the first device of each kind."""
        first = [own[0] for own in kinds]
        rows = [row_caps(problem, problem.devices[k]) for k in first]
        return cls(np.array(rows), block_caps(problem)[:, first])

    def of_groups(self, states: States) -> list[tuple[int, Ints]]:
        """Return the numbers of the sets that share a stage, by the place g - 2 of their caps."""
        places = states.counts.sum(axis=1) - 2
        if (self.rows == self.rows[:, :1]).all():
            places = np.minimum(places, 0)
        return [(each, np.flatnonzero(places == each)) for each in range(places.max() + 1)]


def stage_costs(
    problem: ClusterProblem,
    states: States,
    kinds: Sequence[Sequence[int]],
    caps: Caps,
    m: int,
    blocks: Ints,
) -> Costs:
    """Return the costs of stages of ``blocks`` [D] blocks."""
    devices = [problem.devices[own[0]] for own in kinds]
    u, v, w, ell = np.array([(d.time.u, d.time.v, d.time.w, d.time.ell) for d in devices]).T
    rows = np.arange(1, largest_rows(problem, m) + 1)
    held = blocks[:, None, None]
    compute = held * (u[:, None] * rows + v[:, None])  # [D, T, n]
    hop = np.broadcast_to(w[:, None] * rows + ell[:, None], compute.shape)
    longest = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
    result = Costs(*np.full((2, len(states.counts), len(blocks)), np.inf))
    sync = _syncs(problem, states, kinds)[:, None] * blocks
    for others, number in caps.of_groups(states):
        fits = rows <= caps.rows[:, others, m - 1, blocks - 1].T[:, :, None]
        done = np.where(fits, compute + hop, np.inf)
        shared = _shared(done, longest, states.counts[number], len(rows))
        once = (0.0 if problem.latency == "bound" else shared.once) + sync[number]
        result.once[number] = np.where(np.isfinite(shared.pace), once, np.inf)
        result.pace[number] = shared.pace
    alone = _alone(problem, kinds, caps.blocks[m - 1], m, blocks)
    place = np.flatnonzero(states.alone)
    kind = states.first[place]
    result.once[place], result.pace[place] = alone.once[kind], alone.pace[kind]
    return result


def _shared(done: Floats, longest: Floats, counts: Ints, rows: int) -> Costs:
    """Give rows to whom they delay least: the time of a set is the n-th smallest of its devices'
    times ``done`` [D, T, n], and its pace the largest of ``longest`` at the devices' rows."""
    sizes, kinds, most = done.shape
    flat = done.reshape(sizes, -1)
    order = flat.argsort(axis=1, kind="stable")
    ascending = np.take_along_axis(flat, order, axis=1)
    # how many rows each kind has taken within each time, [D, T, T·n]
    taken = np.cumsum(order[:, None] // most == np.arange(kinds)[:, None], axis=2, dtype=np.float32)
    enough = counts.astype(np.float32) @ taken >= rows  # [D, N, T·n]
    place = enough.argmax(axis=2)  # 0 if there are never enough, or for the empty set
    places = np.arange(sizes)[:, None]
    fits = enough[places, np.arange(len(counts)), place]
    once = np.where(fits, ascending[places, place], np.inf)
    own = taken.swapaxes(1, 2)[places, place].astype(int)  # rows of a device, [D, N, T]
    paces = np.take_along_axis(longest, np.maximum(own - 1, 0).swapaxes(1, 2), axis=2)
    used = (own > 0) & (counts > 0)
    pace = np.where(used, paces.swapaxes(1, 2), 0.0).max(axis=2)
    return Costs(once.T, np.where(np.isfinite(once), pace, np.inf).T)


def _alone(
    problem: ClusterProblem, kinds: Sequence[Sequence[int]], caps: Ints, m: int, blocks: Ints
) -> Costs:
    """Return the costs of stages on one device of each kind, [T, D], as without sharing."""
    size = problem.batch_size / m
    laws = [problem.devices[own[0]].time for own in kinds]
    compute = np.array([law.compute(1, size) for law in laws])[:, None] * blocks
    hop = np.array([law.hop(size) for law in laws])[:, None]
    held = caps[:, None] >= blocks
    pace = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
    once = np.zeros_like(pace) if problem.latency == "bound" else compute + hop
    return Costs(np.where(held, once, np.inf), np.where(held, pace, np.inf))


def _syncs(problem: ClusterProblem, states: States, kinds: Sequence[Sequence[int]]) -> Floats:
    """Return the seconds of a block's sync in each set, [N]; infinite if a device shares none."""
    laws = [problem.devices[own[0]].sharing for own in kinds]
    each = np.array([np.inf if law is None else law.sync_s for law in laws])
    number = np.maximum(states.counts.sum(axis=1), 1)
    slowest = np.where(states.counts > 0, each, 0.0).max(axis=1)
    return np.asarray(2 * (number - 1) / number * np.where(number > 1, slowest, 0.0))
