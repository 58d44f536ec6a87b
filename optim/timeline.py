"""When each device of a planned pipeline computes and sends, under the law it was planned with."""

from dataclasses import dataclass
from itertools import accumulate

from collapipe.plan import Span
from optim.problem import ClusterProblem, Partition


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """A segment's share of a batch; seconds from the batch's beginning."""

    device: int  # its place among the cluster's
    span: Span
    compute_s: float  # C of one micro-batch, forward and backward together
    hop_s: float  # H of one micro-batch, likewise
    computes: tuple[float, ...]  # when each of the m micro-batches begins to be computed
    hops: tuple[float, ...]  # and to be sent on

    @property
    def busy_s(self) -> float:
        """Seconds of computing, m·C."""
        return len(self.computes) * self.compute_s

    @property
    def first_s(self) -> float:
        """When the device begins to compute."""
        return self.computes[0]

    @property
    def last_s(self) -> float:
        """When it has computed its last micro-batch."""
        return self.computes[-1] + self.compute_s


def timeline(problem: ClusterProblem, partition: Partition) -> tuple[SegmentTimes, ...]:
    """The segments of a batch in the order in which activations pass them.

    The last hop ends when the law's latency is over. Replicas (VanillaFL) compute side by side and
    send nothing.
    """
    if partition.replicated:
        whole, share = Span(0, problem.num_blocks), problem.batch_size / len(problem.devices)
        alone = [device.time.compute(whole.blocks, share) for device in problem.devices]
        return tuple(SegmentTimes(k, whole, s, 0.0, (0.0,), (s,)) for k, s in enumerate(alone))
    count, size = partition.num_micro_batches, problem.batch_size / partition.num_micro_batches
    held = [device for device, blocks in enumerate(partition.blocks) if blocks]
    laws = [problem.devices[device].time for device in held]
    computes = [law.compute(partition.blocks[d], size) for law, d in zip(laws, held, strict=True)]
    hops = [law.hop(size) for law in laws]
    starts = _starts(problem.latency, computes, hops, count)
    firsts = accumulate((partition.blocks[device] for device in held), initial=0)
    return tuple(
        SegmentTimes(device, Span(first, partition.blocks[device]), compute, hop, *pair)
        for device, first, compute, hop, pair in zip(
            held, firsts, computes, hops, starts, strict=False
        )
    )


def _starts(
    latency: str, computes: list[float], hops: list[float], count: int
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """When each stage begins to compute and to send, s."""
    if latency == "overlap":  # a device and its link are two machines in a row
        machines = [time for pair in zip(computes, hops, strict=True) for time in pair]
        starts = _flow_shop(machines, count)
        return list(zip(starts[::2], starts[1::2], strict=True))
    chunks = [compute + hop for compute, hop in zip(computes, hops, strict=True)]
    if latency == "bound":  # every stage keeps the slowest one's pace
        chunks = [max(chunks)] * len(chunks)
    return [
        (begins, tuple(begin + compute for begin in begins))
        for begins, compute in zip(_flow_shop(chunks, count), computes, strict=True)
    ]


def _flow_shop(times: list[float], count: int) -> list[tuple[float, ...]]:
    """When each machine in a row begins each of ``count`` identical jobs.

    The first job meets nobody; job i is held up by the slowest machine so far, i times.
    """
    arrivals = accumulate(times, initial=0.0)
    paces = accumulate(times, max)
    return [
        tuple(arrival + job * pace for job in range(count))
        for arrival, pace in zip(arrivals, paces, strict=False)
    ]
