"""Partitioning rules of other systems, as cluster solvers for comparison.

Each returns a single point without a bound. It raises an error if its rule gives a device more than
memory or energy allow. Rules for all devices use the first L if there are more devices than blocks.

PipeDream and PipeEdge minimise the slowest stage, which the problem's law multiplies by m - 1. It
is compute and hop together, or the longer of the two under ``overlap``. Both programmes run for
every m within the caps of memory and energy, and the m with the least latency is kept.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.state import ROUNDING, DeviceProfile
from optim.latency import block_caps, fitting_micro_batches
from optim.partition.exact import exact_partition
from optim.partition.single_point import Cut, answer, single_point, split_latency
from optim.problem import ClusterProblem, ClusterSolution, Floats, Partition

FIXED_MICRO_BATCHES = 8
"""m of the baselines that do not choose m."""
MOST_DEVICES = 12
"""Largest number of devices for PipeEdge's programme, whose time doubles with each device."""


def vanilla_fl(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
    """Federated learning without a pipeline: every device trains all L blocks on b/K samples.

    Devices exchange nothing, and the slowest one determines the time: max_k L·(u_k·b/K + v_k).

    Raises ``InfeasibleRoundError`` that names each device that cannot hold or afford L blocks.
    """
    started = perf_counter()
    share = problem.batch_size / len(problem.devices)
    too_small = [text for device in problem.devices if (text := _shortage(problem, device, share))]
    if too_small:
        raise InfeasibleRoundError(
            f"vanilla_fl: every device trains all {problem.num_blocks} blocks, but "
            f"{', '.join(too_small)}; lower model.num_blocks or let the exact solver split"
        )
    slowest = max(device.time.compute(problem.num_blocks, share) for device in problem.devices)
    blocks = (problem.num_blocks,) * len(problem.devices)
    return answer("vanilla_fl", problem, Partition(blocks, 1, slowest, replicated=True), started)


def _shortage(problem: ClusterProblem, device: DeviceProfile, share: float) -> str:
    """Describe what a device lacks for all L blocks on ``share`` samples; empty if nothing."""
    kept = math.ceil(share) / problem.batch_size  # the part of the batch that it keeps
    if (held := device.memory_cap(share, problem.num_blocks, kept)) < problem.num_blocks:
        return f"{device.name} holds at most {held}"
    if device.energy is None:
        return ""
    spent = device.energy.law.compute(problem.num_blocks, share)
    limit = device.energy.limit_j
    exceeds = spent > limit * (1 + ROUNDING)
    return f"{device.name} needs {spent:.4g} J of {limit:.4g} J" if exceeds else ""


@single_point("pipeline")
def pipeline_even(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """PipeLine: ⌊L/K⌋ or ⌈L/K⌉ blocks on each device in the given order, m = 8."""
    return _even(problem), min(FIXED_MICRO_BATCHES, problem.max_micro_batches)


@single_point("titanic")
def titanic(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """TITANIC: blocks in proportion to speed over all K devices, m = 8.

    Speed is blocks per second of compute at that micro-batch's size. Shares are rounded by largest
    remainder, so that a device far slower than the others may hold none.
    """
    m = min(FIXED_MICRO_BATCHES, problem.max_micro_batches)
    size = problem.batch_size / m
    seconds = np.array([device.time.compute(1, size) for device in problem.devices])
    # Devices without any compute time share all blocks.
    speeds = 1 / seconds if seconds.all() else (seconds == 0).astype(float)
    quotas = problem.num_blocks * speeds / speeds.sum()
    blocks = np.floor(quotas).astype(int)
    order = np.argsort(blocks - quotas, kind="stable")  # earlier ones win ties
    blocks[order[: problem.num_blocks - int(blocks.sum())]] += 1
    return tuple(blocks.tolist()), m


@single_point("no_segment_scheduling")
def no_segment_scheduling(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """CollaPipe without segment scheduling: S and m of the exact optimum on random devices.

    The blocks are split evenly over S devices; every set of S devices is equally likely.
    """
    on_uplink = [each for each in problem.activation_s[1:] if math.isfinite(each)]
    best_channel_s = (on_uplink or problem.activation_s)[:1]  # the time on the best channel
    best = exact_partition(replace(problem, activation_s=tuple(best_channel_s))).best
    chosen = rng.choice(len(problem.devices), size=best.num_segments, replace=False)
    held = even_blocks(problem.num_blocks, best.num_segments)
    return _placed(problem, chosen, held), best.num_micro_batches


@single_point("gpipe")
def gpipe(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """GPipe: an even split over all devices in the given order, with the fastest m."""
    blocks = _even(problem)
    room = (block_caps(problem) - np.asarray(blocks)).min(axis=1)
    fitting = ((room >= 0).nonzero()[0] + 1).tolist()
    if not fitting:  # the error then names the m that lacks the least
        return blocks, int(room.argmax()) + 1
    return blocks, min(fitting, key=lambda m: split_latency(problem, blocks, m))


def even_blocks(num_blocks: int, num_segments: int) -> list[int]:
    """Return ⌊L/S⌋ or ⌈L/S⌉ blocks for each of S segments; the larger shares come first."""
    share, larger = divmod(num_blocks, num_segments)
    return [share + (segment < larger) for segment in range(num_segments)]


def _even(problem: ClusterProblem) -> tuple[int, ...]:
    count = min(len(problem.devices), problem.num_blocks)
    return _placed(problem, range(count), even_blocks(problem.num_blocks, count))


def _placed(problem: ClusterProblem, chosen: Iterable[int], held: Iterable[int]) -> tuple[int, ...]:
    """Return the blocks of all devices, of which the chosen ones hold these, in their order."""
    blocks = dict(zip(map(int, chosen), held, strict=True))
    return tuple(blocks.get(device, 0) for device in range(len(problem.devices)))


@single_point("pipedream")
def pipedream(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """Solve PipeDream's dynamic programme over runs of blocks, in FTPipeHD's form.

    A(k, l) = min over δ of max(A(k - 1, l - δ), stage_k(δ)), over the devices in the given order.
    As in FTPipeHD every device that can hold a block is a stage (the first L devices if there are
    more). PipeDream may also replicate a stage over several devices; segments here cannot.

    Raises ``InfeasibleRoundError`` if the caps cannot hold the model.
    """
    return _fastest(problem, lambda stages: range(min(stages.shape)))


@single_point("pipeedge")
def pipeedge(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """Solve PipeEdge's programme over subsets of devices, which need not use all devices.

    h(D, l) = min over δ of max(h(D - k, l - δ), stage_k(δ)). A hop counts for its sender, so the
    order within a subset D does not matter, and k is its last device. Of equally good subsets the
    smallest is chosen, then the one with the earliest devices.

    Raises ``InfeasibleRoundError`` for more than 12 devices, or if the caps cannot hold the model.
    """
    if len(problem.devices) > MOST_DEVICES:
        raise InfeasibleRoundError(
            f"pipeedge: {len(problem.devices)} devices, at most {MOST_DEVICES}, because it checks "
            "every subset; choose another solver or list fewer devices"
        )
    return _fastest(problem, best_subset)


def _fastest(problem: ClusterProblem, choose: Callable[[Floats], Sequence[int]]) -> Cut:
    """Return the fastest split over all m; ``choose`` picks devices by stage times [K, L]."""
    splits = []
    for m in fitting_micro_batches(problem):
        stages = stage_times(problem, m)
        usable = np.isfinite(stages[:, 0]).nonzero()[0]
        chosen = usable[choose(stages[usable])]
        splits.append((_placed(problem, chosen, slowest_stage_split(stages[chosen])), m))
    return min(splits, key=lambda split: split_latency(problem, *split))


def stage_times(problem: ClusterProblem, num_micro_batches: int) -> Floats:
    """Return the seconds of a stage with δ = 1 … L blocks on each device, [K, L]; infinite above
    the device's cap."""
    size = problem.batch_size / num_micro_batches
    held = np.arange(1, problem.num_blocks + 1)
    computes = np.array([device.time.compute(1, size) for device in problem.devices])[:, None]
    hops = np.array([device.time.hop(size) for device in problem.devices])[:, None]
    overlap = problem.latency == "overlap"
    times = np.maximum(computes * held, hops) if overlap else computes * held + hops
    caps = block_caps(problem)[num_micro_batches - 1]
    return np.where(held <= caps[:, None], times, np.inf)


def slowest_stage_split(stages: Floats) -> list[int]:
    """Return δ ≥ 1 of each device in ``stages`` [S, L] that minimises the slowest stage."""
    num_blocks = stages.shape[1]
    reached = [_without_devices(num_blocks)]
    for times in stages:
        reached.append(_extended(reached[-1], times))
    blocks: list[int] = []
    left = num_blocks
    for before, times in zip(reached[-2::-1], stages[::-1], strict=True):
        slowest = np.maximum(before[left - 1 :: -1], times[:left])
        blocks.append(int(slowest.argmin()) + 1)
        left -= blocks[-1]
    return blocks[::-1]


def best_subset(stages: Floats) -> list[int]:
    """Return the indices of the devices in ``stages`` [K, L] that minimise the slowest stage, in
    order."""
    reached = _without_devices(stages.shape[1])[None]
    for times in stages:
        reached = np.concatenate([reached, _extended(reached, times)])
    slowest = reached[:, -1]
    subsets = (
        [place for place in range(subset.bit_length()) if subset >> place & 1]
        for subset in (slowest == slowest.min()).nonzero()[0].tolist()
    )
    return min(subsets, key=lambda members: (len(members), members))


def _without_devices(num_blocks: int) -> Floats:
    """Return the slowest stage without devices, [L + 1]: 0 for 0 blocks, infinite for more."""
    return np.concatenate([[0.0], np.full(num_blocks, np.inf)])


def _extended(reached: Floats, times: Floats) -> Floats:
    """Return the slowest stage for 0 … L blocks, [..., L + 1], after adding one device that holds
    at least one block."""
    extended = np.full_like(reached, np.inf)
    for held, seconds in enumerate(times, start=1):
        if np.isinf(seconds):
            break
        later = extended[..., held:]
        np.minimum(later, np.maximum(reached[..., :-held], seconds), out=later)
    return extended
