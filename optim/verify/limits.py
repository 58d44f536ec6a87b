"""What a device can hold on its own, computed independently of the solvers: C7 and C9'."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapipe.state import ROUNDING, AffineLaw, DeviceProfile, Link, MemoryBudget
from optim.problem import Bools, ClusterProblem, Floats, Ints

_UP_TO_ROUNDING = 1 + ROUNDING  # as the solvers count limits of exactly n blocks


def possible(
    problem: ClusterProblem, place: int | None = None, margin: float = _UP_TO_ROUNDING
) -> Bools:
    """Return whether each device can hold 0 … L blocks, [R, K, L + 1], for each m from the least.

    ``place`` counts from the end of the pipeline; without one the device is the first of all. A
    device that may recompute does so if that helps, and sends over any hop. ``margin`` is a factor
    of the limits.
    """
    m = np.arange(problem.min_micro_batches, problem.max_micro_batches + 1)[:, None]
    blocks = np.arange(problem.num_blocks + 1)
    kept = np.array([[problem.kept(int(each), place)] for each in m[:, 0]])
    size, held = problem.batch_size / m, list[Bools]()
    for device in problem.devices:
        within = _within_energy(device, blocks, size, m, margin)
        if device.max_blocks is not None:
            within &= blocks <= device.max_blocks
        budgets = _budgets(device, device.memory)
        needed = (needed_bytes(each, blocks, np.ceil(size), kept) for each in budgets)
        held.append((within & _any_within(budgets, needed, margin)) | (blocks == 0))
    return np.stack(held, axis=1)


def possible_rows(problem: ClusterProblem, device: DeviceProfile, m: int, members: int) -> Bools:
    """Return whether a device can have 1 … ⌈b/m⌉ rows of a stage of 1 … L blocks, [L, ⌈b/m⌉].

    ``members`` devices share the stage, which is the last of the pipeline.
    """
    most, law = -(-problem.batch_size // m), device.sharing
    blocks, rows = np.arange(1, problem.num_blocks + 1)[:, None], np.arange(1, most + 1)
    if law is None:
        return np.full((len(blocks), most), False)
    within = _within_energy(device, blocks, rows, m, _UP_TO_ROUNDING, members)
    if law.max_blocks is not None:
        within &= blocks <= law.max_blocks
    kept = np.minimum(1.0, problem.num_in_flight(m, place=1) * rows / problem.batch_size)
    budgets = _budgets(device, law.memory)
    # of how many blocks it receives gradients: see ``received_gradients``
    led = (members - 1) * np.minimum(blocks, (blocks + members - 1) * rows / most)
    needed = (needed_bytes(b, blocks, rows, kept) + led * b.trained_bytes for b in budgets)
    return within & _any_within(budgets, needed, _UP_TO_ROUNDING)


def _budgets(device: DeviceProfile, own: MemoryBudget | None) -> list[MemoryBudget]:
    """Return the device's memory in each way: without recomputing, and with it."""
    return [each for each in (own, device.recomputing and device.recomputing.memory) if each]


def _any_within(budgets: Sequence[MemoryBudget], needed: Iterable[Floats], margin: float) -> Bools:
    """Return whether one of the budgets, if there are any, allows these bytes."""
    within = [each <= own.limit_bytes * margin for own, each in zip(budgets, needed, strict=True)]
    return np.asarray(np.logical_or.reduce(within) if within else True)


def needed_bytes(
    memory: MemoryBudget, blocks: Ints | int, samples: NDArray[Any] | int, kept: Floats | float
) -> Floats:
    """Return the bytes of a stage that keeps tensors of ``kept`` of a batch's rows."""
    each = memory.block_bytes - (1 - kept) * memory.batch_block_bytes
    segment = memory.segment_bytes - (1 - kept) * memory.batch_segment_bytes
    return np.asarray(segment + blocks * (each + memory.sample_bytes * samples))


def _within_energy(
    device: DeviceProfile,
    blocks: Ints,
    size: NDArray[Any],
    m: NDArray[Any] | int,
    margin: float,
    members: int = 1,
) -> Bools:
    """Return whether the device's energy is enough, over its usual hop or a link."""
    if (budget := device.energy) is None:
        return np.full(np.broadcast_shapes(blocks.shape, size.shape), True)
    of_batch, law = budget.scope == "batch", budget.law
    hops: tuple[AffineLaw | Link, ...] = (law, *budget.links)
    hop = np.minimum.reduce([each.w * size + each.ell for each in hops])
    spent = (m if of_batch else 1) * (blocks * law.u * size + blocks * law.v + hop)
    spent = spent + of_batch * 2 * (1 - 1 / members) * blocks * budget.sync_j
    return np.asarray(spent <= budget.limit_j * margin)
