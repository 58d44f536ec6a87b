"""How many blocks each device of a cluster holds."""

import math
import time

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate, SegmentPlan, Span
from collapipe.state import DeviceProfile
from optim.latency import pipeline_latency
from optim.partition.additive import sum_splits
from optim.partition.bound import bound_splits
from optim.partition.rates import PROGRESS, Rates, Split
from optim.problem import ClusterProblem, ClusterSolution, Partition


def even_partition(
    num_blocks: int, devices: tuple[DeviceProfile, ...], num_segments: int | None = None
) -> tuple[SegmentPlan, ...]:
    """⌊L/S⌋ or ⌈L/S⌉ blocks on each of the first S devices; the larger shares come first.

    Raises
    ------
    InfeasibleRoundError
        Where S exceeds the devices or the blocks.
    """
    segments = num_segments or min(num_blocks, len(devices))
    if not 1 <= segments <= min(num_blocks, len(devices)):
        raise InfeasibleRoundError(
            f"{segments} segments for {len(devices)} devices and {num_blocks} blocks; "
            "a segment needs a device and a block of its own: lower pipeline.num_segments"
        )
    share, larger = divmod(num_blocks, segments)
    plans, first = [], 0
    for index, device in enumerate(devices[:segments]):
        span = Span(first, share + (index < larger))
        plans.append(SegmentPlan(device.name, span))
        first = span.stop
    return tuple(plans)


def exact_partition(
    problem: ClusterProblem,
    rng: np.random.Generator | None = None,
    time_limit_s: float = math.inf,
) -> ClusterSolution:
    """The whole front of Sub-1: of each S the fastest partition, proved to be so.

    Nothing is drawn from ``rng``. A time limit may leave the front incomplete; the certificate's
    lower bound of the latency holds all the same.

    Raises
    ------
    InfeasibleRoundError
        Where the caps cannot hold the model at any m.
    """
    start = time.perf_counter()
    rates = Rates.of(problem)
    if not rates.sufficient_rows().size:
        raise InfeasibleRoundError(_shortage(problem, rates))
    alone, fastest_alone = _alone(problem, rates)
    search = bound_splits if problem.latency == "bound" else sum_splits
    splits, lower = search(rates, fastest_alone, start + time_limit_s)
    front = _front(problem, alone + splits)
    objective = front[-1].latency_s
    # What is left of a search to the end is rounding.
    lower = objective if lower >= objective * (1 - 10 * PROGRESS) else lower
    elapsed = time.perf_counter() - start
    certificate = Certificate(objective, lower, "exact", elapsed)
    # Within the limit no part of the search can have been left out.
    return ClusterSolution(front, certificate, complete=elapsed < time_limit_s)


def _alone(problem: ClusterProblem, rates: Rates) -> tuple[list[Split], float]:
    """S = 1 in closed form: the fastest single device, with the smallest m that is as fast."""
    rows = np.arange(len(rates.caps))
    whole = np.full_like(rates.caps, rates.num_blocks)
    chunk = rates.per_block * rates.num_blocks + rates.hop
    slowest = chunk if problem.latency == "bound" else rates.bottleneck(rows, whole)
    latency = np.where(rates.caps >= whole, chunk + rows[:, None] * slowest, np.inf)
    fastest = float(latency.min())
    if math.isinf(fastest):
        return [], fastest
    row, device = np.argwhere(latency <= fastest * (1 + PROGRESS))[0]
    blocks = np.zeros(rates.caps.shape[1], np.int64)
    blocks[device] = rates.num_blocks
    return [Split(int(row) + 1, blocks)], fastest


def _front(problem: ClusterProblem, splits: list[Split]) -> tuple[Partition, ...]:
    """The splits that no other with as few segments beats."""
    partitions = [_partition(problem, split) for split in splits]
    partitions.sort(key=lambda one: (one.num_segments, one.latency_s, one.num_micro_batches))
    front = partitions[:1]
    for one in partitions[1:]:
        if one.latency_s < front[-1].latency_s * (1 - PROGRESS):
            front.append(one)
    return tuple(front)


def _partition(problem: ClusterProblem, split: Split) -> Partition:
    blocks, m = tuple(split.blocks.tolist()), split.num_micro_batches
    latency = pipeline_latency(problem.devices, blocks, problem.batch_size, m, problem.latency)
    return Partition(blocks, m, latency)


def _shortage(problem: ClusterProblem, rates: Rates) -> str:
    """How many blocks fit where, and what would be enough."""
    row = int(rates.caps.sum(axis=1).argmax())
    caps = [int(cap) for cap in rates.caps[row]]
    missing = problem.num_blocks - sum(caps)
    held = ", ".join(
        f"{device.name}: {cap}" for device, cap in zip(problem.devices, caps, strict=True)
    )
    cut = f"{row + 1} micro-batch{'es' if row else ''}"
    return (
        f"the devices hold at most {sum(caps)} of {problem.num_blocks} blocks "
        f"({held}; {cut}); {_remedy(problem, caps, row + 1, missing)}"
    )


def _remedy(problem: ClusterProblem, caps: list[int], m: int, missing: int) -> str:
    """More energy, as far as memory lets it help, then memory or a smaller model."""
    raises = []
    for device, cap in zip(problem.devices, caps, strict=True):
        memory = problem.num_blocks if device.max_blocks is None else device.max_blocks
        more = min(memory - cap, missing)
        if device.energy is None or more <= 0:
            continue
        joules = device.energy.law.chunk(cap + more, problem.batch_size / m)
        joules *= m if device.energy.scope == "batch" else 1
        # Rounded up: the figure has to be enough.
        raises.append(f"{device.name}'s energy to {math.ceil(joules * 100) / 100:.2f} J")
        missing -= more
    if missing:
        raises.append(f"memory by {missing} blocks in all, lower model.num_blocks or use LoRA")
    return "raise " + ", ".join(raises)
