"""A cluster's front: constraints C1, C2, C7 and C9', latencies, order and certificate."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from collapipe.state import AffineLaw
from optim.problem import Bools, ClusterProblem, ClusterSolution, Floats, Ints, Partition
from optim.verify.tolerance import MARGIN, check_certificate, differs, exceeds, is_count, violation


def verify_cluster(solution: ClusterSolution, problem: ClusterProblem) -> None:
    """Check every point of the front, their order, and the certificate of the last one.

    Replicas (VanillaFL) have a rule of their own: L blocks on every device, b/K samples on each,
    no micro-batches and no hop.

    Raises ``PlanViolationError`` with the constraint that fails, the device and the numbers.
    """
    if not solution.front:
        raise violation("front", "it has no point")
    for point in solution.front:
        check_point(point, problem)
        _check_latency(point, problem)
    _check_order(solution.front)
    check_certificate(solution.certificate, solution.front[-1].latency_s)
    _refute_bound(solution, problem)


def check_point(point: Partition, problem: ClusterProblem) -> None:
    """Check C1, C2, C7 and C9' of one partition. Raises as ``verify_cluster``."""
    num_blocks, m = problem.num_blocks, point.num_micro_batches
    if len(point.blocks) != len(problem.devices):
        raise violation("C1", f"{_named(point)} are for {len(problem.devices)} devices")
    for device, held in zip(problem.devices, point.blocks, strict=True):
        if not is_count(held):
            raise violation("C1", f"{device.name} holds {held} blocks")
        if point.replicated and held != num_blocks:
            raise violation(
                "C1", f"replica on {device.name} holds {held} blocks, not L={num_blocks}"
            )
    if point.replicated and m != 1:
        raise violation("C1", f"replicas with m={m}, must be 1")
    if not point.replicated:
        total, most = sum(point.blocks), min(len(problem.devices), num_blocks)
        if total != num_blocks:
            raise violation("C1", f"{_named(point)} sum up to {total}, not L={num_blocks}")
        if not 1 <= point.num_segments <= most:
            raise violation(
                "C2", f"{_named(point)} make S={point.num_segments}, must be 1 to {most}"
            )
        if not (is_count(m) and 1 <= m <= problem.max_micro_batches):
            raise violation(
                "C1", f"{_named(point)} with m={m}, must be 1 to {problem.max_micro_batches}"
            )
    _check_caps(point, problem)


def _check_caps(point: Partition, problem: ClusterProblem) -> None:
    for device, held in zip(problem.devices, point.blocks, strict=True):
        if device.max_blocks is not None and held > device.max_blocks:
            raise violation(
                "C7", f"{device.name} holds {held} blocks, its memory {device.max_blocks}"
            )
        if device.energy is None or not held:
            continue
        times = point.num_micro_batches if device.energy.scope == "batch" else 1
        spent = times * _once(device.energy.law, held, point, problem)
        if exceeds(spent, device.energy.limit_j):
            raise violation(
                "C9'",
                f"{device.name} spends {spent:.12g} J a {device.energy.scope} on {held} blocks "
                f"with m={point.num_micro_batches}, its limit is {device.energy.limit_j:.12g} J",
            )


def _check_latency(point: Partition, problem: ClusterProblem) -> None:
    if point.replicated:
        held = zip(problem.devices, point.blocks, strict=True)
        expected = max(_once(device.time, count, point, problem) for device, count in held)
    else:
        blocks, m = np.array([point.blocks]), np.array([point.num_micro_batches])
        expected = float(_latencies(blocks, m, problem)[0])
    if not math.isfinite(expected) or differs(point.latency_s, expected):
        raise violation(
            "latency",
            f"{point.latency_s:.12g} s for {_named(point)} with m={point.num_micro_batches}, "
            f"{'replicas' if point.replicated else problem.latency} take {expected:.12g} s",
        )


def _check_order(front: Sequence[Partition]) -> None:
    for before, after in itertools.pairwise(front):
        if not before.num_segments < after.num_segments:
            raise violation("front", f"S={after.num_segments} follows S={before.num_segments}")
        if not before.latency_s > after.latency_s:
            raise violation(
                "front",
                f"S={after.num_segments} takes {after.latency_s:.12g} s and dominates nothing: "
                f"S={before.num_segments} takes {before.latency_s:.12g} s",
            )


def _named(point: Partition) -> str:
    return f"blocks {', '.join(map(str, point.blocks))}"


def _once(law: AffineLaw, held: int, point: Partition, problem: ClusterProblem) -> float:
    """Seconds or joules of one micro-batch; of a replica, of all its samples."""
    if point.replicated:
        return held * (law.u * problem.batch_size / len(problem.devices) + law.v)
    size = problem.batch_size / point.num_micro_batches
    return held * law.u * size + held * law.v + law.w * size + law.ell


def _refute_bound(solution: ClusterSolution, problem: ClusterProblem) -> None:
    blocks, m = _near(solution.front[-1], problem)
    latencies = np.where(_within_caps(blocks, m, problem), _latencies(blocks, m, problem), math.inf)
    best = int(np.argmin(latencies))
    if exceeds(solution.certificate.lower_bound, float(latencies[best])):
        raise violation(
            "lower bound",
            f"{solution.certificate.lower_bound:.12g} s, but blocks "
            f"{', '.join(map(str, blocks[best]))} with m={m[best]} take {latencies[best]:.12g} s",
        )


def _near(point: Partition, problem: ClusterProblem) -> tuple[Ints, Ints]:
    """Partitions near ``point`` and their m, [P, K] and [P].

    The same blocks with every m; one block or all of a device moved to another; all on one device.
    """
    one = np.eye(len(problem.devices), dtype=np.int64)
    alone = problem.num_blocks * one
    held = alone[0] if point.replicated else np.array(point.blocks)
    every_m = np.arange(1, problem.max_micro_batches + 1)
    moved = [
        held + amount * (one - one[source])
        for source in np.flatnonzero(held)
        for amount in {1, int(held[source])}
    ]
    blocks = np.concatenate([np.tile(held, (len(every_m), 1)), *moved, alone])
    rest = np.full(len(blocks) - len(every_m), point.num_micro_batches)
    return blocks, np.concatenate([every_m, rest])


def _latencies(blocks: Ints, m: Ints, problem: ClusterProblem) -> Floats:
    """Seconds of a batch under the problem's law, for ``blocks`` [P, K] and ``m`` [P]."""
    laws = [device.time for device in problem.devices]
    u, v = np.array([law.u for law in laws]), np.array([law.v for law in laws])
    w, ell = np.array([law.w for law in laws]), np.array([law.ell for law in laws])
    size = (problem.batch_size / m)[:, None]
    compute = blocks * u * size + blocks * v
    hop = np.where(blocks > 0, w * size + ell, 0.0)
    longest: Floats = np.max(compute + hop, axis=1)
    if problem.latency == "bound":
        segments: Ints = np.count_nonzero(blocks, axis=1)
        return longest * (segments - 1 + m)
    if problem.latency == "overlap":
        longest = np.max(np.maximum(compute, hop), axis=1)
    once: Floats = np.sum(compute + hop, axis=1)
    return once + longest * (m - 1)


def _within_caps(blocks: Ints, m: Ints, problem: ClusterProblem) -> Bools:
    """Which of P partitions keep C7 and C9', with a margin for rounding, [P]."""
    within: Bools = np.full(len(blocks), True)
    size = problem.batch_size / m
    for held, device in zip(blocks.T, problem.devices, strict=True):
        if device.max_blocks is not None:
            within &= held <= device.max_blocks
        if device.energy is not None:
            law = device.energy.law
            spent = held * law.u * size + held * law.v + law.w * size + law.ell
            times = m if device.energy.scope == "batch" else 1
            within &= (held == 0) | (times * spent <= device.energy.limit_j * MARGIN)
    return within
