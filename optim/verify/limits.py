"""What a device can hold by itself, independently of the solvers: C7 and C9'."""

import numpy as np

from collapipe.state import DeviceProfile, MemoryBudget
from optim.problem import Bools, ClusterProblem, Floats, Ints
from optim.verify.tolerance import MARGIN


def possible(
    problem: ClusterProblem, place: int | None = None, margin: float = 2 - MARGIN
) -> Bools:
    """Return whether each device can hold 0 … L blocks, [R, K, L + 1], for each m from the least.

    ``place`` counts from the end of the pipeline; without one the device is the first of all. A
    device that may recompute does so if that helps. ``margin`` is a factor of the limits.
    """
    m = np.arange(problem.min_micro_batches, problem.max_micro_batches + 1)
    blocks = np.arange(problem.num_blocks + 1)
    kept = np.array([problem.kept(int(each), place) for each in m])
    by_device = (_holds(device, blocks, m, kept, problem, margin) for device in problem.devices)
    return np.stack(list(by_device), axis=1)


def _holds(
    device: DeviceProfile,
    blocks: Ints,
    m: Ints,
    kept: Floats,
    problem: ClusterProblem,
    margin: float,
) -> Bools:
    """Return whether the device can hold these blocks, [R, L + 1]."""
    size = (problem.batch_size / m)[:, None]
    ways = [way for way in (device.memory, device.recomputing and device.recomputing.memory) if way]
    within = np.full((len(m), len(blocks)), not ways)
    for memory in ways:
        within |= _needed(memory, blocks, np.ceil(size), 1 - kept[:, None]) <= (
            memory.limit_bytes * margin
        )
    if device.max_blocks is not None:
        within &= blocks <= device.max_blocks
    if device.energy is not None:
        law = device.energy.law
        spent = blocks * law.u * size + blocks * law.v + law.w * size + law.ell
        times = m[:, None] if device.energy.scope == "batch" else 1
        within &= times * spent <= device.energy.limit_j * margin
    return np.asarray(within | (blocks == 0))


def _needed(memory: MemoryBudget, blocks: Ints, samples: Floats, freed: Floats) -> Floats:
    """Return the bytes of blocks if ``freed`` of a batch's rows are not kept, [R, L + 1]."""
    each = memory.block_bytes - freed * memory.batch_block_bytes + memory.sample_bytes * samples
    return memory.segment_bytes - freed * memory.batch_segment_bytes + blocks * each
