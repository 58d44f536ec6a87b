"""Dynamic programmes of other systems that minimise the slowest stage, for comparison.

The problem's law multiplies the slowest stage by m - 1. It is compute and hop together, or the
longer of the two under ``overlap``. Both programmes run for every m within the caps of memory and
energy, and the m with the least latency is kept. They give no bound of that latency.
"""

from collections.abc import Callable, Sequence

import numpy as np

from collapipe.errors import InfeasibleRoundError
from optim.latency import block_caps, fitting_micro_batches
from optim.partition.single_point import Cut, single_point, split_latency
from optim.problem import ClusterProblem, Floats

MOST_DEVICES = 12
"""Largest number of devices for PipeEdge's programme, whose time doubles with each device."""


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
    """Return the split with the least latency over all m. ``choose`` selects the devices from the
    stage times [K, L]."""
    splits = []
    for m in fitting_micro_batches(problem):
        stages = stage_times(problem, m)
        usable = np.isfinite(stages[:, 0]).nonzero()[0]
        chosen = usable[choose(stages[usable])]
        blocks = [0] * len(problem.devices)
        for device, held in zip(chosen.tolist(), slowest_stage_split(stages[chosen]), strict=True):
            blocks[device] = held
        splits.append((tuple(blocks), m))
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
    reached = [_nothing_held(num_blocks)]
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
    reached = _nothing_held(stages.shape[1])[None]
    for times in stages:
        reached = np.concatenate([reached, _extended(reached, times)])
    slowest = reached[:, -1]
    subsets = (
        [place for place in range(subset.bit_length()) if subset >> place & 1]
        for subset in (slowest == slowest.min()).nonzero()[0].tolist()
    )
    return min(subsets, key=lambda members: (len(members), members))


def _nothing_held(num_blocks: int) -> Floats:
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
