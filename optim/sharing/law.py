"""The time of a stage whose rows several devices share, and the rows that a device can hold.

A device k with y rows of a micro-batch and δ blocks takes δ·(u·y + v) + (w·y + ℓ) seconds. Its rows
are whole, and a stage takes as long as its slowest device. A device alone has b/m rows, as in a
pipeline without sharing. After the batch the devices of a stage add their gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from collapipe.plan import ClusterPlan
from collapipe.state import ROUNDING, DeviceProfile, ring_s
from optim.latency import fitting, partition_of
from optim.problem import ClusterProblem, Ints, Partition, Stage, stages_of_plan


def largest_rows(problem: ClusterProblem, num_micro_batches: int) -> int:
    """Return ⌈b/m⌉, the rows of the largest micro-batch."""
    return math.ceil(problem.batch_size / num_micro_batches)


def row_caps(
    problem: ClusterProblem, device: DeviceProfile, most_members: int | None = None
) -> Ints:
    """Return the most rows that a device can have of a stage that g = 2 … K devices share,
    [K - 1, M, L], for m = 1 … M and δ = 1 … L; 0 below the problem's least m. With
    ``most_members`` only up to so many devices count.

    Memory (C7), energy (C9') and the owner's limit of blocks are counted for these rows. Caps fall
    with g, because a device receives the gradients of more devices, and are below ⌈b/m⌉, because
    another device has a row. A cluster of one device has the caps of g = 2.
    """
    most = most_members or len(problem.devices)
    members = np.arange(2, max(most, 2) + 1)[:, None, None]
    m = np.arange(1, problem.max_micro_batches + 1)[:, None]
    rows, blocks = -(-problem.batch_size // m), np.arange(1, problem.num_blocks + 1)
    shape = len(members), len(m), len(blocks)
    if (law := device.sharing) is None:
        return np.zeros(shape, dtype=np.int64)
    caps = np.broadcast_to(rows - 1, shape).astype(float)  # another device has a row
    caps[:, : problem.min_micro_batches - 1] = 0
    if law.max_blocks is not None:
        caps[:, :, law.max_blocks :] = 0
    if (memory := law.memory) is not None:
        limit = memory.limit_bytes * (1 + ROUNDING)
        left = limit - (memory.segment_bytes - memory.batch_segment_bytes)
        left_in_all = left - blocks * (memory.block_bytes - memory.batch_block_bytes)
        of_batch = memory.batch_segment_bytes + blocks * memory.batch_block_bytes
        count = np.array([problem.num_in_flight(int(each)) for each in m[:, 0]])[:, None]
        each = count * of_batch / problem.batch_size + blocks * memory.sample_bytes
        sets = (members - 1) * memory.trained_bytes  # as ``received_gradients`` counts them
        led_all = fitting(left_in_all - sets * blocks, each)
        led_part = fitting(left_in_all, each + sets * (blocks + members - 1) / rows)
        np.minimum(caps, np.maximum(led_all, led_part), out=caps)
    if (budget := device.energy) is not None:
        once, times = budget.law, m if budget.scope == "batch" else 1
        left_j = budget.limit_j * (1 + ROUNDING) / times - (blocks * once.v + once.ell)
        if budget.scope == "batch":
            left_j = left_j - 2 * (members - 1) / members * blocks * budget.sync_j / m
        np.minimum(caps, fitting(left_j, blocks * once.u + once.w), out=caps)
    return np.asarray(np.maximum(caps, 0), dtype=np.int64)


def balanced_rows(
    problem: ClusterProblem,
    devices: Sequence[int],
    blocks: int,
    rows: int,
    caps: Sequence[Sequence[int]],
    threshold: float = math.inf,
) -> tuple[int, ...] | None:
    """Return how many of ``rows`` each device has for the least compute and hop of the slowest one,
    if no compute or hop exceeds the ``threshold``; None if they exceed the ``caps`` of these
    devices: without recomputing, and in either way.

    Each row in turn goes to the device that is then done first, which is optimal because every
    device's time grows with its rows, and of several to that with the least pace under ``overlap``.
    """
    given, free = [0] * len(devices), list[tuple[float, float, int]]()
    laws = [[problem.devices[k].in_mode(on).time for on in (False, True)] for k in devices]

    def offer(place: int) -> None:
        """Put the device's next row among the free ones, if it may have one more."""
        plain, most = caps[place]
        own, size = laws[place][given[place] >= plain], given[place] + 1
        pace = max(own.compute(blocks, size), own.hop(size))
        if size <= most and pace <= threshold:
            heappush(free, (own.chunk(blocks, size), pace, place))

    for place in range(len(devices)):
        offer(place)
    for _ in range(rows):
        if not free:
            return None
        *_, place = heappop(free)
        given[place] += 1
        offer(place)
    return tuple(given)


def stage_of(
    problem: ClusterProblem,
    devices: Sequence[int],
    blocks: int,
    m: int,
    caps: Sequence[Ints],
    threshold: float = math.inf,
) -> Stage:
    """Return a stage with balanced rows; devices without rows are left out, all if none fit.
    ``caps`` are these devices' rows of ``caps.Caps``, [2, K - 1, M, L] each. The problem has the
    hops to the next stage."""
    rows, others = largest_rows(problem, m), len(devices) - 1
    if len(devices) == 1:
        return Stage(tuple(devices), (rows,), blocks)
    most = [each[:, others - 1, m - 1, blocks - 1].tolist() for each in caps]
    given = balanced_rows(problem, devices, blocks, rows, most, threshold) or ()
    used = [pair for pair in zip(devices, given, strict=False) if pair[1]]
    return Stage(tuple(k for k, _ in used), tuple(y for _, y in used), blocks)


def partition_of_plan(problem: ClusterProblem, plan: ClusterPlan) -> Partition:
    """Return the partition of a plan's segments with its times, for the problem's devices.

    Raises ``KeyError`` if the plan has other devices.
    """
    m = plan.num_micro_batches
    stages = stages_of_plan(plan, problem.devices, largest_rows(problem, m))
    return partition_of_stages(problem, stages, m)


def stages_of(problem: ClusterProblem, partition: Partition) -> tuple[Stage, ...]:
    """Return the stages of any partition but replicas, in pipeline order."""
    rows = largest_rows(problem, partition.num_micro_batches)
    held = enumerate(partition.blocks)
    return partition.stages or tuple(Stage((k,), (rows,), blocks) for k, blocks in held if blocks)


def rows_of(problem: ClusterProblem, stage: Stage, rows: int, m: int) -> float:
    """Return the rows for which a device's time is counted: b/m for a device alone."""
    return problem.batch_size / m if len(stage.devices) == 1 else rows


def stage_times(problem: ClusterProblem, stage: Stage, m: int) -> tuple[float, float, float]:
    """Return a stage's compute and hop times of a micro-batch and its sync after the batch, s.

    Compute and hop are those of the device that needs longest for both. The sync is the time in
    which the stage's g devices add their gradients in a ring.
    """
    laws = [problem.devices[k].sharing for k in stage.devices]
    return *max(_device_times(problem, stage, m), key=sum), ring_s(laws, stage.blocks)


def stage_pace(problem: ClusterProblem, stage: Stage, m: int) -> float:
    """Return the seconds between two micro-batches of a stage that always has input."""
    times = _device_times(problem, stage, m)
    return max(map(max, times)) if problem.latency == "overlap" else max(map(sum, times))


def _device_times(problem: ClusterProblem, stage: Stage, m: int) -> list[tuple[float, float]]:
    """Return compute and hop of each of the stage's devices."""
    found = list[tuple[float, float]]()
    for device, rows in zip(stage.devices, stage.rows, strict=True):
        law, size = problem.devices[device].time, rows_of(problem, stage, rows, m)
        found.append((law.compute(stage.blocks, size), law.hop(size)))
    return found


def in_order(problem: ClusterProblem, stages: Sequence[Stage]) -> ClusterProblem:
    """Return the problem without links, in which devices have the hops and syncs that these stages
    give them.

    A device sends as slowly to each device of the next stage as to the slowest of them.
    """
    if not problem.linked:
        return problem
    names = [[problem.devices[k].name for k in stage.devices] for stage in stages]
    devices = [each.before(()) for each in problem.devices]
    for stage, own, following in zip(stages, names, [*names[1:], ()], strict=True):
        for k in stage.devices:
            devices[k] = problem.devices[k].before(following, members=own)
    return replace(problem, devices=tuple(devices))


def energy_j(problem: ClusterProblem, partition: Partition) -> dict[int, float]:
    """Return the joules of a batch on each device with a budget that holds blocks."""
    stages, m = stages_of(problem, partition), partition.num_micro_batches
    devices, spent = in_order(problem, stages).devices, dict[int, float]()
    for stage in stages:
        ring = 2 * (len(stage.devices) - 1) / len(stage.devices)
        for k, rows in zip(stage.devices, stage.rows, strict=True):
            if budget := devices[k].energy:
                spent[k] = m * budget.law.chunk(stage.blocks, rows_of(problem, stage, rows, m))
                spent[k] += ring * stage.blocks * budget.sync_j
    return spent


def partition_of_stages(problem: ClusterProblem, stages: Sequence[Stage], m: int) -> Partition:
    """Return the partition of these stages with its times under the problem's law.

    Syncs are counted one after another, though stages may overlap them with the drain: an upper
    bound, exact for one shared stage.
    """
    problem, held = in_order(problem, stages), [0] * len(problem.devices)
    for stage in stages:
        for device in stage.devices:
            held[device] = stage.blocks
    order = [stage.devices for stage in stages if not stage.shares]
    if order == [(device,) for device, blocks in enumerate(held) if blocks]:
        return partition_of(problem, held, m)
    times = [stage_times(problem, stage, m) for stage in stages]
    later_s = problem.head_s / m, problem.gradient_s / m
    pace = max(stage_pace(problem, stage, m) for stage in stages)
    chunks = [compute + hop for compute, hop, _ in times]
    encoder = len(stages) * pace if problem.latency == "bound" else sum(chunks)
    slowest, syncs = max(pace, *later_s, 0.0), sum(sync for *_, sync in times)
    latency = encoder + sum(later_s) + syncs + (m - 1) * slowest
    return Partition(tuple(held), m, latency, slowest, stages=tuple(stages))
