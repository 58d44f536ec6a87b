"""Rules of systems that share stages or tune plans greedily, as cluster solvers for comparison.

Each returns a single point without a bound.
"""

import math
from collections.abc import Iterator
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError
from optim.latency import block_caps, fitting_micro_batches, partition_of
from optim.partition.baselines import even_blocks
from optim.partition.single_point import answer
from optim.problem import ClusterProblem, ClusterSolution, Ints, Partition
from optim.sharing.caps import Caps
from optim.sharing.costs import Tables
from optim.sharing.law import partition_of_stages, stage_of
from optim.sharing.states import states_of

MOST_DEVICES = 10
"""Largest number of devices for Asteroid's programme here, whose table has 2^K stages."""


def asteroid(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
    """Asteroid's dynamic programme (Ye et al. 2024): the fastest slowest stage.

    Devices are in one order, by memory from the largest; a stage is a run of devices in this order,
    each with some rows or none. The m with the least latency is kept.

    Raises ``InfeasibleRoundError`` for more than 10 devices, or if no such plan fits.
    """
    started = perf_counter()
    if len(problem.devices) > MOST_DEVICES:
        raise InfeasibleRoundError(
            f"asteroid: {len(problem.devices)} devices, at most {MOST_DEVICES}, because it "
            "tabulates every set; choose another solver or list fewer devices"
        )
    order = sorted(range(len(problem.devices)), key=lambda k: -_memory(problem, k))
    kinds, states = [[k] for k in order], states_of((1,) * len(order))
    tables = Tables.of(problem, states, [problem], kinds, [Caps.of([problem], kinds)])
    plans = (_runs(problem, order, tables, m) for m in _counts(problem))
    found = [plan for plan in plans if plan is not None]
    if not found:
        raise InfeasibleRoundError(
            f"asteroid: no cut into runs of {len(problem.devices)} devices fits; choose another "
            "solver"
        )
    return answer("asteroid", problem, min(found, key=lambda each: each.latency_s), started)


def _memory(problem: ClusterProblem, device: int) -> float:
    law = problem.devices[device].sharing
    return math.inf if law is None or law.memory is None else law.memory.limit_bytes


def _counts(problem: ClusterProblem) -> range:
    return range(problem.min_micro_batches, problem.max_micro_batches + 1)


def _runs(problem: ClusterProblem, order: list[int], tables: Tables, m: int) -> Partition | None:
    """Return the cut into runs with the fastest slowest stage for one m; None if none fits."""
    states, (caps,) = tables.states, tables.caps
    blocks = np.arange(1, problem.num_blocks + 1)
    pace = tables.costs(np.array([m]), blocks).pace[0, 0, 0]
    numbers = {tuple(counts): number for number, counts in enumerate(states.counts.tolist())}
    used = np.broadcast_to(np.arange(len(pace))[:, None], pace.shape).copy()
    for counts in sorted(numbers, key=sum):  # a device may have no row
        for k in (k for k, there in enumerate(counts) if there and sum(counts) > 1):
            every, fewer = numbers[counts], numbers[*counts[:k], 0, *counts[k + 1 :]]
            better = pace[fewer] < pace[every]
            for each in (pace, used):
                each[every] = np.where(better, each[fewer], each[every])

    def run(first: int, stop: int) -> int:
        return numbers[tuple(int(first <= k < stop) for k in range(len(order)))]

    # slowest[d][l]: of the first d devices with l blocks
    slowest = np.full((len(order) + 1, problem.num_blocks + 1), np.inf)
    slowest[0, 0] = 0.0
    chosen = dict[tuple[int, int], tuple[int, int]]()
    for stop in range(1, len(order) + 1):
        for first in range(stop):
            for held, own in enumerate(pace[run(first, stop)].tolist(), start=1):
                for before in range(problem.num_blocks - held + 1):
                    value = max(slowest[first, before], own)
                    if value < slowest[stop, before + held]:
                        slowest[stop, before + held] = value
                        chosen[stop, before + held] = first, held
    if not np.isfinite(slowest[-1, -1]):
        return None
    stages, stop, left = [], len(order), problem.num_blocks
    while stop:
        first, held = chosen[stop, left]
        kept = states.counts[used[run(first, stop), held - 1]].nonzero()[0].tolist()
        own = [order[k] for k in kept]
        stages.append(stage_of(problem, own, held, m, [caps.rows[0, k] for k in kept]))
        stop, left = first, left - held
    return partition_of_stages(problem, stages[::-1], m)


def adaptis(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
    """Tune a plan greedily, as AdaPtis' generator does (2025), for stages on single devices.

    The tuning begins with an even split, or with one within the caps, and takes the best of these
    changes until none helps: move a block to any device, move all blocks of a device, or take
    another m. Schedules and several stages on one device are not tuned.

    Raises ``InfeasibleRoundError`` if the caps cannot hold the model.
    """
    started, caps = perf_counter(), block_caps(problem)
    best = _first(problem, caps)
    while True:
        near = list(_changed(problem, best, caps))
        faster = min(near, key=lambda each: each.latency_s, default=best)
        if faster.latency_s >= best.latency_s:
            return answer("adaptis", problem, best, started)
        best = faster


def _first(problem: ClusterProblem, caps: Ints) -> Partition:
    m = fitting_micro_batches(problem)[-1]
    blocks, room = [0] * len(problem.devices), caps[m - 1].tolist()
    used = [k for k, cap in enumerate(room) if cap][: problem.num_blocks]
    for device, held in zip(used, even_blocks(problem.num_blocks, len(used)), strict=True):
        blocks[device] = min(held, room[device])
    for device in used:  # what even shares leave over
        blocks[device] += min(problem.num_blocks - sum(blocks), room[device] - blocks[device])
    return partition_of(problem, blocks, m)


def _changed(problem: ClusterProblem, point: Partition, caps: Ints) -> Iterator[Partition]:
    m, blocks = point.num_micro_batches, np.array(point.blocks)
    near = [(blocks, count) for count in {m - 1, m + 1, m // 2, 2 * m}]
    one = np.eye(len(blocks), dtype=int)
    near += [
        (blocks + amount * (one[sink] - one[source]), m)
        for source in np.flatnonzero(blocks).tolist()
        for sink in range(len(blocks))
        for amount in {1, int(blocks[source])}
    ]
    for held, count in near:
        if count in _counts(problem) and (held <= caps[count - 1]).all():
            yield partition_of(problem, held.tolist(), count)
