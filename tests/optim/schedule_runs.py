"""Simulated pipelines that are followed by an uplink, a head and a downlink."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from collapipe.state import AffineLaw, DeviceProfile
from optim.latency import batch_s, partition_of
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Latency
from pipeline.schedule import Schedule, alternate
from tests.optim.discrete_event import Chunk, LaterStages, Sender, makespan
from tests.optim.instances import paper_like

LAWS: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")
SENDERS: dict[Latency, Sender] = {"bound": "device", "flow_shop": "device", "overlap": "link"}
UPLINK_S = 100663296 / (5e5 * np.log2(1 + 0.5 * 0.97 / 0.07))  # 67 s per step on channel ``paper``

Scheduler = Callable[[int, int], Schedule]


@dataclass(frozen=True)
class Case:
    """Chunks of both directions, m, and the stages after the last segment."""

    forward: list[Chunk]
    backward: list[Chunk]
    m: int
    later: LaterStages

    def run(self, schedule: Scheduler, latency: Latency) -> float:
        """Return the simulated seconds of the schedule."""
        built = schedule(len(self.forward), self.m)
        return makespan(built, self.forward, self.backward, SENDERS[latency], self.later)

    def law(self, latency: Latency) -> float:
        """Return the planned seconds; a planner treats both directions as one chunk."""
        laws = [
            AffineLaw(f.compute_s + b.compute_s, 0.0, 0.0, f.hop_s + b.hop_s)
            for f, b in zip(self.forward, self.backward, strict=True)
        ]
        devices = tuple(DeviceProfile(f"device-{k}", law) for k, law in enumerate(laws))
        rest = self.m * self.later.head_s, self.m * self.later.gradient_s
        problem = ClusterProblem(devices, len(laws), self.m, self.m, latency, (0.0,), *rest)
        return batch_s(partition_of(problem, [1] * len(laws), self.m), self.m * self.later.uplink_s)


def draws(
    count: int,
    stages: tuple[bool, bool, bool],
    hops: bool = False,
    constant_ratios: bool = True,
) -> list[Case]:
    """Draw pipelines of up to eight segments, followed by the chosen ones of three ``stages``.

    A later stage takes about as long as a segment. With ``constant_ratios``, backward computes take
    twice as long as forward on every device, and hops take equally long.
    """
    rng, cases = np.random.default_rng(1), []
    for _ in range(count):
        segments, m = int(rng.integers(1, 9)), int(rng.integers(1, 17))
        pairs = zip(
            rng.uniform(0.1, 1, segments), rng.uniform(0.05, 1, segments) * hops, strict=True
        )
        forward = [Chunk(*pair) for pair in pairs]
        factors = rng.uniform(0.3, 3, (segments, 2))
        if constant_ratios:
            factors[:] = 2.0, 1.0
        backward = [
            Chunk(chunk.compute_s * more, chunk.hop_s * longer)
            for chunk, (more, longer) in zip(forward, factors, strict=True)
        ]
        later = LaterStages(*(rng.uniform(0, 3, 3) * stages).tolist())
        cases.append(Case(forward, backward, m, later))
    return cases


def ratios(cases: list[Case], schedule: Scheduler, latency: Latency = "flow_shop") -> list[float]:
    """Return the ratio of each simulated time to the law's time."""
    return [case.run(schedule, latency) / case.law(latency) for case in cases]


UPLINK, ALL = (True, False, False), (True, True, True)


def two_more_in_flight(num_segments: int, num_micro_batches: int) -> Schedule:
    """Return 1F1B in which each segment begins with two more forwards."""
    ahead = (num_segments - stage + 2 * (stage < num_segments) for stage in range(num_segments + 1))
    return tuple(alternate(min(each, num_micro_batches), num_micro_batches) for each in ahead)


def papers(latency: Latency, head_s: float = 0.0, gradient_s: float = 0.0) -> list[Case]:
    """Return the best partitions of 60 paper-like clusters for uploads of ``UPLINK_S``.

    Forward passes are a third of the computes and half of the hops.
    """
    cases = []
    for seed in range(60):
        problem = replace(
            paper_like(np.random.default_rng(seed), latency),
            activation_s=(float(UPLINK_S),),
            head_s=head_s,
            gradient_s=gradient_s,
        )
        best = exact_partition(problem).best
        m, size = best.num_micro_batches, problem.batch_size / best.num_micro_batches
        chunks = [
            Chunk(device.time.compute(held, size), device.time.hop(size))
            for device, held in zip(problem.devices, best.blocks, strict=True)
            if held
        ]
        forward = [Chunk(each.compute_s / 3, each.hop_s / 2) for each in chunks]
        backward = [Chunk(each.compute_s * 2 / 3, each.hop_s / 2) for each in chunks]
        later = LaterStages(float(UPLINK_S) / m, head_s / m, gradient_s / m)
        cases.append(Case(forward, backward, m, later))
        planned_s = batch_s(best, float(UPLINK_S))
        assert math.isclose(cases[-1].law(latency), planned_s, rel_tol=1e-9)
    return cases
