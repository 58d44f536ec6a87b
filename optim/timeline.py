"""The times at which each stage of a planned batch is busy, under the plan's latency law."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from collapipe.plan import Span
from optim.problem import ClusterProblem, Partition, Stage
from optim.sharing.law import rows_of, stage_pace, stage_times, stages_of


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """A device's part of a batch; times in seconds since the start of the batch.

    Devices that share a stage have the same span and starts. Those with less to do than the slowest
    one wait for it.
    """

    device: int  # index among the cluster's devices
    span: Span
    compute_s: float  # C of one micro-batch, forward and backward together
    hop_s: float  # H of one micro-batch, forward and backward together
    computes: tuple[float, ...]  # start of computing each of the m micro-batches
    hops: tuple[float, ...]  # start of sending each of the m micro-batches
    rows: int | None = None  # of a micro-batch, in a shared stage
    # of a shared stage: when its devices begin to add their gradients, and how long they do
    sync: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage after the encoder; times in seconds since the start of the batch."""

    name: str  # ``uplink``, ``head`` or ``gradients``
    each_s: float  # seconds of one micro-batch
    starts: tuple[float, ...]  # start of each of the m micro-batches


def stages_after_encoder(
    problem: ClusterProblem, partition: Partition, activation_s: float
) -> tuple[StageTimes, ...]:
    """Return the stages after the encoder: the uplink, the head, and sending the gradients.

    ``activation_s`` is the uplink time of a batch's activations. Stages without time are omitted.
    Replicas (VanillaFL) have no such stages.
    """
    if partition.replicated:
        return ()
    count = partition.num_micro_batches
    later_s = [activation_s / count, problem.head_s / count, problem.gradient_s / count]
    encoder = _machines(problem.latency, *_chunks(problem, partition))
    starts = _flow_shop(encoder + later_s, count)[len(encoder) :]
    return tuple(
        StageTimes(name, each_s, each)
        for name, each_s, each in zip(("uplink", "head", "gradients"), later_s, starts, strict=True)
        if each_s
    )


def timeline(problem: ClusterProblem, partition: Partition) -> tuple[SegmentTimes, ...]:
    """Return the segments of a batch in pipeline order.

    Without stages after the encoder and without syncs, the last hop ends at the partition's
    latency. Replicas (VanillaFL) compute in parallel and send nothing.
    """
    if partition.replicated:
        whole, share = Span(0, problem.num_blocks), problem.batch_size / len(problem.devices)
        alone = [device.time.compute(whole.blocks, share) for device in problem.devices]
        return tuple(SegmentTimes(k, whole, s, 0.0, (0.0,), (s,)) for k, s in enumerate(alone))
    count = partition.num_micro_batches
    found, first = list[SegmentTimes](), 0
    starts = _starts(problem.latency, *_chunks(problem, partition), count)
    for stage, pair in zip(stages_of(problem, partition), starts, strict=True):
        found += _of_stage(problem, stage, first, count, *pair)
        first += stage.blocks
    return tuple(found)


def _of_stage(
    problem: ClusterProblem,
    stage: Stage,
    first: int,
    m: int,
    computes: tuple[float, ...],
    hops: tuple[float, ...],
) -> Iterator[SegmentTimes]:
    """Yield the times of a stage's devices; in a shared one each sends when it has computed."""
    span = Span(first, stage.blocks)
    *times, sync = stage_times(problem, stage, m)
    for device, rows in zip(stage.devices, stage.rows, strict=True):
        law, size = problem.devices[device].time, rows_of(problem, stage, rows, m)
        own = law.compute(stage.blocks, size), law.hop(size)
        if len(stage.devices) == 1:
            yield SegmentTimes(device, span, *own, computes, hops)
        else:
            sends = tuple(start + own[0] for start in computes)
            added = computes[-1] + sum(times), sync
            yield SegmentTimes(device, span, *own, computes, sends, rows, added)


def _chunks(problem: ClusterProblem, partition: Partition) -> tuple[list[float], list[float]]:
    """Return C and H of a micro-batch for each stage.

    Their sum is the slowest device's in a shared stage; under ``overlap`` the longer of them is the
    longest compute or hop of any device.
    """
    m, computes, hops = partition.num_micro_batches, list[float](), list[float]()
    for stage in stages_of(problem, partition):
        compute, hop, _ = stage_times(problem, stage, m)
        if problem.latency == "overlap" and len(stage.devices) > 1:
            pace = stage_pace(problem, stage, m)
            compute, hop = (pace, compute + hop - pace)
        computes.append(compute)
        hops.append(hop)
    return computes, hops


def _machines(latency: str, computes: list[float], hops: list[float]) -> list[float]:
    """Return the seconds of a micro-batch on each machine of the encoder, in order."""
    if latency == "overlap":  # a device and its link are two machines
        return [time for pair in zip(computes, hops, strict=True) for time in pair]
    chunks = [compute + hop for compute, hop in zip(computes, hops, strict=True)]
    if latency == "bound":  # every stage takes as long as the slowest one
        chunks = [max(chunks)] * len(chunks)
    return chunks


def _starts(
    latency: str, computes: list[float], hops: list[float], count: int
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the times at which each stage begins to compute and to send, s."""
    starts = _flow_shop(_machines(latency, computes, hops), count)
    if latency == "overlap":
        return list(zip(starts[::2], starts[1::2], strict=True))
    return [
        (begins, tuple(begin + compute for begin in begins))
        for begins, compute in zip(starts, computes, strict=True)
    ]


def _flow_shop(times: list[float], count: int) -> list[tuple[float, ...]]:
    """Return the times at which each machine in a row begins each of ``count`` identical jobs.

    The first job never waits. Job i is i times the slowest machine's time so far later.
    """
    arrivals = accumulate(times, initial=0.0)
    paces = accumulate(times, max)
    return [
        tuple(arrival + job * pace for job in range(count))
        for arrival, pace in zip(arrivals, paces, strict=False)
    ]
