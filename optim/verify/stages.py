"""Verify the stages of partitions: rows and times, by formulas of their own but for links, whose
hops are those of ``DeviceProfile.before``."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise

from optim.problem import ClusterProblem, Partition, Stage
from optim.verify.tolerance import is_count, violation


def check_stages(point: Partition, problem: ClusterProblem) -> None:
    """Check that stages hold L blocks and all rows, each device once. Raises
    ``PlanViolationError``."""
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
        ends = {*accumulate(stage.shares)}
        whole = all(is_count(each) and each for each in stage.shares)
        if stage.shares and not (whole and max(ends) == rows and {*accumulate(stage.rows)} <= ends):
            raise violation("rows", f"shares {stage.shares} do not make the rows {stage.rows}")
    if tuple(held) != tuple(point.blocks):
        raise violation("C1", f"blocks {point.blocks}, the stages hold {tuple(held)}")
    if (total := sum(stage.blocks for stage in point.stages)) != problem.num_blocks:
        raise violation("C1", f"stages hold {total} blocks, not L={problem.num_blocks}")


def places_from_the_end(point: Partition) -> dict[int, int]:
    """Return the place of each device that holds blocks; that of the last stage is 1."""
    places = enumerate(reversed(_in_order(point)), start=1)
    return {k: place for place, own in places for k in own}


def over_links(point: Partition, problem: ClusterProblem) -> ClusterProblem:
    """Return the problem without links, in which devices have this partition's hops and syncs."""
    order = [[problem.devices[k].name for k in own] for own in _in_order(point)]
    peers = {name: own for own in order for name in own}
    ahead = {name: following for own, following in pairwise(order) for name in own}
    devices = (
        each.before(ahead.get(each.name, ()), peers.get(each.name, ())) for each in problem.devices
    )
    return replace(problem, devices=tuple(devices))


def _in_order(point: Partition) -> list[tuple[int, ...]]:
    """Return the devices of each stage."""
    return [stage.devices for stage in stages_of(point)]


def stages_of(point: Partition) -> tuple[Stage, ...]:
    """Return the stages in pipeline order; the rows of a device alone are not counted."""
    alone = (Stage((k,), (0,), held) for k, held in enumerate(point.blocks) if held)
    return point.stages or tuple(alone)


def latency_of_stages(point: Partition, problem: ClusterProblem) -> tuple[float, float]:
    """Return the seconds of a batch and its slowest stage's of a micro-batch, without links."""
    m = point.num_micro_batches
    passed, paces, syncs = [], [], 0.0
    for stage in stages_of(point):
        times = _times(stage, problem, m)
        passed.append(max(compute + hop for compute, hop in times))
        overlap = problem.latency == "overlap"
        paces.append(max(max(pair) if overlap else sum(pair) for pair in times))
        laws = [problem.devices[k].sharing for k in stage.devices]
        if len(laws) > 1:
            slowest = max(law.sync_s for law in laws if law is not None)
            syncs += 2 * (1 - 1 / len(laws)) * stage.blocks * slowest
    later_s = problem.head_s / m, problem.gradient_s / m
    pace = max(*paces, *later_s)
    once = len(paces) * max(paces) if problem.latency == "bound" else sum(passed)
    return once + sum(later_s) + syncs + (m - 1) * pace, pace


def _times(stage: Stage, problem: ClusterProblem, m: int) -> list[tuple[float, float]]:
    """Return each device's compute and hop."""
    rows = stage.rows if len(stage.rows) > 1 else (problem.batch_size / m,)
    laws = (problem.devices[k].time for k in stage.devices)
    pairs = zip(laws, rows, strict=True)
    return [(stage.blocks * (law.u * y + law.v), law.w * y + law.ell) for law, y in pairs]
