"""Verify partitions with shared stages: rows, limits and times, independently of the solver."""

import math
from dataclasses import replace
from itertools import pairwise

from collapipe.state import DeviceProfile, received_gradients
from optim.problem import ClusterProblem, Partition, Stage
from optim.verify.tolerance import exceeds, is_count, violation


def check_stages(point: Partition, problem: ClusterProblem) -> None:
    """Check that stages hold L blocks and all rows, each device once and within its limits.

    A stage on one device is checked like a segment. Raises ``PlanViolationError``.
    """
    places = places_from_the_end(point)
    used = [device for stage in point.stages for device in stage.devices]
    if len(set(used)) < len(used) or not set(used) <= set(range(len(problem.devices))):
        raise violation("C2", f"stages on devices {used}, each of K={len(problem.devices)} once")
    held = [0] * len(problem.devices)
    rows = math.ceil(problem.batch_size / point.num_micro_batches)
    for stage in point.stages:
        for device in stage.devices:
            held[device] = stage.blocks
        counted = all(is_count(each) and each for each in (*stage.rows, stage.blocks))
        if not counted or len(stage.rows) != len(stage.devices) or sum(stage.rows) != rows:
            raise violation("rows", f"{stage.rows} for devices {stage.devices}, expected {rows}")
        for device, own in zip(stage.devices, stage.rows, strict=True):
            if len(stage.devices) > 1:
                kept = problem.kept(point.num_micro_batches, places[device])
                _check_member(problem.devices[device], stage, own, point, problem, kept)
    if tuple(held) != tuple(point.blocks):
        raise violation("C1", f"blocks {point.blocks}, the stages hold {tuple(held)}")
    if (total := sum(stage.blocks for stage in point.stages)) != problem.num_blocks:
        raise violation("C1", f"stages hold {total} blocks, not L={problem.num_blocks}")


def places_from_the_end(point: Partition) -> dict[int, int]:
    """Return the place of each device that holds blocks; that of the last stage is 1."""
    places = enumerate(reversed(_in_order(point)), start=1)
    return {k: place for place, own in places for k in own}


def over_links(point: Partition, problem: ClusterProblem) -> ClusterProblem:
    """Return the problem without links, in which devices have this partition's hops: over links
    between stages of one device."""
    pairs = pairwise(_in_order(point))
    to = {own: problem.devices[k].name for (own, *more), (k, *others) in pairs if not more + others}
    devices = (each.before(to.get(k)) for k, each in enumerate(problem.devices))
    return replace(problem, devices=tuple(devices))


def _in_order(point: Partition) -> list[tuple[int, ...]]:
    """Return the devices of each stage."""
    if point.stages:
        return [stage.devices for stage in point.stages]
    return [(device,) for device, held in enumerate(point.blocks) if held]


def _check_member(
    device: DeviceProfile,
    stage: Stage,
    rows: int,
    point: Partition,
    problem: ClusterProblem,
    kept: float,
) -> None:
    law, m, blocks = device.sharing, point.num_micro_batches, stage.blocks
    if law is None:
        raise violation("sharing", f"{device.name} shares a stage without a law for it")
    if law.max_blocks is not None and blocks > law.max_blocks:
        raise violation("C7", f"{device.name} holds {blocks} blocks of at most {law.max_blocks}")
    if (own := law.memory) is not None:
        others = 1 - kept * rows / math.ceil(problem.batch_size / m)
        needed = blocks * (own.block_bytes - others * own.batch_block_bytes)
        needed += blocks * own.sample_bytes * rows
        needed += own.segment_bytes - others * own.batch_segment_bytes
        received = received_gradients(blocks, rows / sum(stage.rows), len(stage.devices))
        needed += received * own.trained_bytes
        if exceeds(needed, own.limit_bytes):
            raise violation(
                "C7",
                f"{device.name} needs {needed:.12g} bytes for {rows} rows of {blocks} blocks, its "
                f"limit is {own.limit_bytes:.12g}",
            )
    if (budget := device.energy) is not None:
        each = blocks * (budget.law.u * rows + budget.law.v) + budget.law.w * rows + budget.law.ell
        spent = each * (m if budget.scope == "batch" else 1)
        if exceeds(spent, budget.limit_j):
            raise violation("C9'", f"{device.name} spends {spent:.12g} J of {budget.limit_j:.12g}")


def latency_of_stages(point: Partition, problem: ClusterProblem) -> tuple[float, float]:
    """Return the seconds of a batch and its slowest stage's of a micro-batch, without links."""
    m = point.num_micro_batches
    passed, paces, syncs = [], [], 0.0
    for stage in point.stages:
        times = _times(stage, problem, m)
        passed.append(max(compute + hop for compute, hop in times))
        overlap = problem.latency == "overlap"
        paces.append(max(max(pair) if overlap else sum(pair) for pair in times))
        laws = [problem.devices[k].sharing for k in stage.devices]
        if len(laws) > 1:
            slowest = max(law.sync_s for law in laws if law is not None)
            syncs += 2 * (1 - 1 / len(laws)) * stage.blocks * slowest
    behind = problem.head_s / m, problem.gradient_s / m
    pace = max(*paces, *behind)
    once = len(paces) * max(paces) if problem.latency == "bound" else sum(passed)
    return once + sum(behind) + syncs + (m - 1) * pace, pace


def _times(stage: Stage, problem: ClusterProblem, m: int) -> list[tuple[float, float]]:
    """Return each device's compute and hop."""
    rows = stage.rows if len(stage.rows) > 1 else (problem.batch_size / m,)
    laws = (problem.devices[k].time for k in stage.devices)
    pairs = zip(laws, rows, strict=True)
    return [(stage.blocks * (law.u * y + law.v), law.w * y + law.ell) for law, y in pairs]
