"""Reference solutions of Sub-1: slow and simple, without the solver's methods."""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from optim.latency import block_caps, micro_batch_sizes
from optim.problem import ClusterProblem, Floats, Ints
from tests.optim.laws import pipeline_latency


def batch_seconds(
    problem: ClusterProblem, m: Ints | int, passed: Floats, slowest: Floats, activation_s: Floats
) -> Floats:
    """Return the seconds of a batch from the encoder's sum of stages and its slowest stage.

    The uplink, the head and the downlink are further stages after the encoder. Arrays are
    broadcast.
    """
    stages = [activation_s / m, problem.head_s / m, problem.gradient_s / m]
    return passed + sum(stages) + (m - 1) * functools.reduce(np.maximum, stages, slowest)


@dataclass(frozen=True)
class EveryPartition:
    """All P feasible partitions: δ is [P, K]; m, S, the encoder's Σ and slowest stage are [P]."""

    problem: ClusterProblem
    blocks: Ints
    m: Ints
    segments: Ints
    passed: Floats
    slowest: Floats

    @classmethod
    def of(cls, problem: ClusterProblem) -> "EveryPartition":
        """Combine each δ with each m, under the problem's law."""
        laws, devices = [device.time for device in problem.devices], len(problem.devices)
        u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T
        every = itertools.product(range(problem.num_blocks + 1), repeat=devices)
        whole = np.array([blocks for blocks in every if sum(blocks) == problem.num_blocks])
        sizes, caps = micro_batch_sizes(problem)[:, None, None], block_caps(problem)[:, None]
        computes, hops = whole * (u * sizes + v), np.where(whole > 0, w * sizes + ell, 0.0)
        stages = np.maximum(computes, hops) if problem.latency == "overlap" else computes + hops
        segments, slowest = (whole > 0).sum(axis=1), stages.max(axis=2)
        passed = (computes + hops).sum(axis=2)
        if problem.latency == "bound":
            passed = segments * slowest
        at = row, place = np.nonzero((whole <= caps).all(axis=2))
        return cls(problem, whole[place], row + 1, segments[place], passed[at], slowest[at])

    def latency(self, activation_s: Floats) -> Floats:
        """Return the seconds of a batch for each uplink time of its activations, [..., P]."""
        times = self.m, self.passed, self.slowest, activation_s[..., np.newaxis]
        return batch_seconds(self.problem, *times)


def by_enumeration(problem: ClusterProblem, activation_s: Floats | float = 0.0) -> Floats:
    """Return the least latency with at most S segments, [..., Smax + 1], by trying every δ and
    m."""
    every, most = EveryPartition.of(problem), min(len(problem.devices), problem.num_blocks)
    latency = every.latency(np.asarray(activation_s))
    least = np.full((*latency.shape[:-1], most + 1), np.inf)
    for segments in range(1, most + 1):
        few = latency[..., every.segments <= segments]
        least[..., segments] = few.min(axis=-1, initial=np.inf)
    return least


def thresholds(problem: ClusterProblem, m: int) -> tuple[Floats, Floats, Floats]:
    """Return times for one m: chunks of δ blocks and their bottlenecks, [K, L], and all
    bottlenecks."""
    size = micro_batch_sizes(problem)[m - 1]
    counts = range(1, problem.num_blocks + 1)
    laws = [device.time for device in problem.devices]
    chunk = np.array([[law.chunk(count, size) for count in counts] for law in laws])
    slowest = chunk
    if problem.latency == "overlap":
        slowest = np.array(
            [[max(law.compute(count, size), law.hop(size)) for count in counts] for law in laws]
        )
    allowed = np.arange(1, problem.num_blocks + 1) <= block_caps(problem)[m - 1][:, None]
    slowest = np.where(allowed, slowest, np.inf)
    return chunk, slowest, np.unique(slowest[allowed])


def by_thresholds(problem: ClusterProblem, activation_s: Floats | float = 0.0) -> Floats:
    """Solve law ``bound`` by trying every m, S and slowest chunk, [..., Smax + 1]."""
    uplink = np.asarray(activation_s)
    most = min(len(problem.devices), problem.num_blocks)
    least = np.full((*uplink.shape, most + 1), np.inf)
    for m in range(1, problem.max_micro_batches + 1):
        _, slowest, levels = thresholds(problem, m)
        held = (slowest <= levels[:, None, None]).sum(axis=2)
        total = np.cumsum(np.sort(held, axis=1)[:, ::-1], axis=1)
        for segments in range(1, most + 1):
            enough = total[:, segments - 1] >= problem.num_blocks
            if enough.any():
                level = levels[enough.argmax()]
                latency = batch_seconds(problem, m, segments * level, level, uplink)
                least[..., segments] = np.minimum(least[..., segments], latency)
    return np.minimum.accumulate(least, axis=-1)


def by_dynamic_programme(problem: ClusterProblem, activation_s: Floats | float = 0.0) -> Floats:
    """Solve the additive laws for every m and bottleneck, by a programme over devices, S and
    blocks.

    Returns the least latencies, [..., Smax + 1].
    """
    uplink = np.asarray(activation_s)
    most = min(len(problem.devices), problem.num_blocks)
    least = np.full((*uplink.shape, most + 1), np.inf)
    for m in range(1, problem.max_micro_batches + 1):
        chunk, slowest, levels = thresholds(problem, m)
        cost = np.full((len(levels), most + 1, problem.num_blocks + 1), np.inf)
        cost[:, 0, 0] = 0
        for k in range(len(problem.devices)):
            before = cost.copy()
            for held in range(1, problem.num_blocks + 1):
                first = np.searchsorted(levels, slowest[k, held - 1])
                with_it = before[first:, :-1, : -held or None] + chunk[k, held - 1]
                np.minimum(cost[first:, 1:, held:], with_it, out=cost[first:, 1:, held:])
        times = cost[:, :, -1], levels[:, None], uplink[..., None, None]
        least = np.minimum(least, batch_seconds(problem, m, *times).min(axis=-2))
    return np.minimum.accumulate(least, axis=-1)


def by_full_devices(problem: ClusterProblem) -> Floats:
    """Like ``by_dynamic_programme``, but all used devices are full except the slowest one per
    block.

    Moving blocks to faster devices turns any partition into such a one. Nothing is pruned.
    """
    num_blocks, most = problem.num_blocks, min(len(problem.devices), problem.num_blocks)
    least = np.full(most + 1, np.inf)
    for m in range(1, problem.max_micro_batches + 1):
        chunk, slowest, levels = thresholds(problem, m)
        order = np.argsort(np.diff(chunk, axis=1)[:, 0])
        for level in levels if m > 1 else levels[-1:]:  # with m = 1 the bottleneck adds no time
            caps = (slowest <= level).sum(axis=1)
            if caps.sum() < num_blocks:
                continue
            cost = np.full((most, num_blocks), np.inf)
            cost[0, 0] = 0
            for k in (k for k in order if caps[k]):
                first = max(0, num_blocks - caps[k])
                last = cost[:, first:] + chunk[k, num_blocks - first - 1 :: -1]
                latency = last.min(axis=1) + (m - 1) * level
                np.minimum(least[1:], latency, out=least[1:])
                if first:
                    full = cost[:-1, :first] + chunk[k, caps[k] - 1]
                    np.minimum(cost[1:, caps[k] :], full, out=cost[1:, caps[k] :])
    return np.minimum.accumulate(least)


def by_milp(problem: ClusterProblem, m: int, segments: int) -> float:
    """Return the least latency with m micro-batches and at most S segments, found by HiGHS.

    The variables are δ_k, whether device k is used, and the bottleneck. The latency is computed
    from the rounded δ.
    """
    count, size = len(problem.devices), micro_batch_sizes(problem)[m - 1]
    compute = np.diag([device.time.compute(1, size) for device in problem.devices])
    hop = np.diag([device.time.hop(size) for device in problem.devices])
    one, none, ones = np.eye(count), np.zeros((count, count)), np.ones((count, 1))
    caps = np.diag(block_caps(problem)[m - 1])
    within = [[compute, hop, -ones]]
    if problem.latency == "overlap":
        within = [[compute, none, -ones], [none, hop, -ones]]
    rows = [LinearConstraint(np.block(blocks), ub=0) for blocks in within]
    rows.append(LinearConstraint(np.block([one, -caps, 0 * ones]), ub=0))
    sums = np.block([[ones.T, 0 * ones.T, 0], [0 * ones.T, ones.T, 0]])
    rows.append(LinearConstraint(sums, [problem.num_blocks, 0], [problem.num_blocks, segments]))
    cost = np.concatenate([compute.sum(axis=0), hop.sum(axis=0), [m - 1]])
    if problem.latency == "bound":
        cost[:] = np.arange(2 * count + 1) == 2 * count
    highest = np.concatenate([np.full(count, problem.num_blocks), np.ones(count), [np.inf]])
    solved = milp(
        cost,
        integrality=np.arange(2 * count + 1) < 2 * count,
        bounds=Bounds(0, highest),
        constraints=rows,
        options={"mip_rel_gap": 0},
    )
    if solved.x is None:
        return math.inf
    blocks = [int(held) for held in np.rint(solved.x[:count])]
    assert sum(blocks) == problem.num_blocks
    return pipeline_latency(problem.devices, blocks, problem.batch_size, m, problem.latency)
