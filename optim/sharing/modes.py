"""Which devices recompute: keep only their segment's inputs, and compute its forward pass again
before backward.

Recomputing takes time, so that a device recomputes only if what it holds does not fit otherwise at
its place in the pipeline.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.state import MOST, AffineLaw, DeviceProfile, MemoryBudget, admitted
from optim.latency import block_caps, memory_cap, model_too_large
from optim.problem import ClusterProblem, Ints, Partition, Stage
from optim.sharing.law import in_order, partition_of_stages, row_caps, stages_of

_MOST_IN_SETS = 12  # devices of which all sets are compared


def either_caps(problem: ClusterProblem) -> Ints:
    """Return the most blocks of each device, [M, K], recomputing or not, over the hop that takes
    least; see ``block_caps``."""
    problem, all_devices = with_hops(problem, min), range(len(problem.devices))
    return np.maximum(*(block_caps(problem.in_modes(on)) for on in ((), all_devices)))


def held_in_order(problem: ClusterProblem) -> tuple[Ints, tuple[int, list[int]]]:
    """Return the most blocks that S = 1 … K devices hold in any order, recomputing or not, [K, M];
    and the m with the most, with each device's blocks.

    For more than 12 devices each one counts as the last.
    """
    count = len(problem.devices)
    caps = np.array([either_caps(problem.at(place + 1)) for place in range(count)])
    if not caps.any():  # the largest m needs the least memory
        return caps[:, :, 0], (caps.shape[1], [0] * count)
    if count > _MOST_IN_SETS or (caps == caps[0]).all():
        row = int(caps[0].sum(axis=1).argmax())
        totals = (-np.sort(-caps[0], axis=1)).cumsum(axis=1).T
        return totals, (row + 1, caps[0][row].tolist())
    best, totals = {0: np.zeros(caps.shape[1], int)}, np.zeros((count, caps.shape[1]), int)
    for devices in range(1, 2**count):
        place = devices.bit_count() - 1
        own = [k for k in range(count) if devices >> k & 1]
        best[devices] = np.max([best[devices ^ 1 << k] + caps[place, :, k] for k in own], axis=0)
        np.maximum(totals[place], best[devices], out=totals[place])
    place, row = (int(each) for each in np.unravel_index(totals.argmax(), totals.shape))
    devices = next(each for each in best if best[each][row] == totals[place, row])
    held = [0] * count
    while devices:
        place = devices.bit_count() - 1
        own = [k for k in range(count) if devices >> k & 1]
        before = {k: best[devices ^ 1 << k][row] + caps[place, row, k] for k in own}
        last = max(before, key=before.__getitem__)
        held[last] = int(caps[place, row, last])
        devices ^= 1 << last
    return totals, (row + 1, held)


def no_plan(problem: ClusterProblem) -> InfeasibleRoundError:
    """Return the error for devices of which no plan fits in any order."""
    totals, most = held_in_order(problem)
    if totals.max() < problem.num_blocks:
        return model_too_large(with_hops(problem, min), most=most)
    return InfeasibleRoundError(
        f"the {len(problem.devices)} devices hold {problem.num_blocks} blocks in no order: raise "
        "their memory, or energy_j for hops to each other, lower model.num_blocks, or train fewer "
        "weights (LoRA)"
    )


def needing(problem: ClusterProblem, point: Partition) -> tuple[int, ...]:
    """Return the devices that must recompute, because what they hold does not fit otherwise."""
    if point.replicated:
        return ()
    stages, m = stages_of(problem, point), point.num_micro_batches
    problem = in_order(problem, stages)
    needed = (
        k
        for place, stage in zip(range(len(stages), 0, -1), stages, strict=True)
        for k in stage.devices
        if problem.devices[k].recomputing and not fits(problem, stage, k, m, place, False)
    )
    return tuple(sorted(needed))


def decided(problem: ClusterProblem, stages: Sequence[Stage], m: int) -> Partition:
    """Return the partition of these stages in which devices recompute that must, with its times."""
    recomputing = needing(problem, partition_of_stages(problem, stages, m))
    plan = partition_of_stages(problem.in_modes(recomputing), stages, m)
    return replace(plan, recomputing=recomputing)


def fits(
    problem: ClusterProblem, stage: Stage, device: int, m: int, place: int, recomputes: bool
) -> bool:
    """Whether a stage's device can hold it at this place from the end, if it ``recomputes`` or
    not."""
    own, whole = problem.devices[device].in_mode(recomputes), problem.at(place)
    if len(stage.devices) == 1:
        return memory_cap(whole, own, m) >= stage.blocks
    rows = stage.rows[stage.devices.index(device)]
    return bool(row_caps(whole, own)[len(stage.devices) - 2, m - 1, stage.blocks - 1] >= rows)


def relaxed(problem: ClusterProblem) -> ClusterProblem:
    """Return a problem without choices of which no plan is slower: devices do not recompute, need
    at most as much memory as at any place in either way, and have their fastest hops."""
    problem = with_hops(problem.at(1), min)
    devices = (_undecided(each, problem.batch_size) for each in problem.devices)
    return replace(problem, devices=tuple(devices))


def with_hops(problem: ClusterProblem, pick: Callable[[Iterable[float]], float]) -> ClusterProblem:
    """Return the problem without links, in which each device has the least time and joules of its
    hops and syncs, or with ``max`` the most."""
    if not problem.linked:
        return problem

    def picked(laws: Sequence[AffineLaw]) -> AffineLaw:
        w, ell = map(pick, zip(*((each.w, each.ell) for each in laws), strict=True))
        return replace(laws[0], w=w, ell=ell)

    names, devices = [(), *([each.name] for each in problem.devices)], list[DeviceProfile]()
    for device in problem.devices:
        first, *_ = ways = [device.before(each, members=each) for each in names]
        laws = [each.energy.law for each in ways if each.energy]
        energy = first.energy and replace(first.energy, law=picked(laws))
        syncs = [each.sharing.sync_s for each in ways if each.sharing]
        sharing = first.sharing and replace(first.sharing, sync_s=pick(syncs))
        time = picked([each.time for each in ways])
        devices.append(replace(first, time=time, energy=energy, sharing=sharing))
    return replace(problem, devices=tuple(devices))


def _undecided(device: DeviceProfile, batch_size: int) -> DeviceProfile:
    """Return the profile with a memory that is enough in either way for no fewer blocks.

    A device keeps at least the tensors of one micro-batch of its rows at the same time.
    """
    if device.recomputing is None or device.memory is None:
        return device
    both = device.memory, device.recomputing.memory

    def least(amounts: Iterable[float]) -> float:
        return admitted(min(amounts), MOST)

    memory = MemoryBudget(
        limit_bytes=device.memory.limit_bytes,
        segment_bytes=least(each.segment_bytes - each.batch_segment_bytes for each in both),
        block_bytes=least(each.block_bytes - each.batch_block_bytes for each in both),
        sample_bytes=least(e.sample_bytes + e.batch_block_bytes / batch_size for e in both),
        trained_bytes=least(each.trained_bytes for each in both),
    )
    sharing = device.sharing and replace(device.sharing, memory=memory)
    return replace(device, memory=memory, sharing=sharing, recomputing=None)
