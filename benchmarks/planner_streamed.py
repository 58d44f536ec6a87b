"""Time of planning with the uplink as a stage, and with a choice of payloads.

The same rounds are planned with uploads after the pipelines, and with uploads that are streamed
during the pipelines. Streamed rounds are also planned with a choice of 5 precisions of activations,
and of 25 pairs of precisions for both uploads.

Clusters have K=6 devices of uneven speed and L=12 blocks. Channels follow the paper's Table II,
where uploading a batch's activations takes about as long as the pipeline computes. First all
clusters' fronts are solved without a cache, then the joint round with these fronts. Every solution
is verified.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from collapipe.state import Channel, Payload, Uplink
from optim.allocation.exact import exact_allocation
from optim.cluster.problem import activation_times
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Latency
from optim.round.problem import RoundOptions, RoundProblem
from optim.verify import verify_cluster, verify_round
from tests.optim.instances import heterogeneous

LAWS: tuple[Latency, ...] = ("bound", "overlap")
NUM_DEVICES, NUM_BLOCKS, ACTIVATION_BITS, MODEL_BITS = 6, 12, 1e8, 9.6e6
_SHARES = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25, "int6": 0.19, "int4": 0.125}
_ERRORS = {"float32": 0.0, "bfloat16": 1e-5, "int8": 1e-4, "int6": 6e-4, "int4": 9e-3}
_CHOICES = tuple(
    Payload(
        *(activation, upload),
        MODEL_BITS * _SHARES[upload],
        ACTIVATION_BITS * _SHARES[activation],
        _ERRORS[activation] + _ERRORS[upload],
    )
    for upload, activation in itertools.product(_SHARES, _SHARES)
)
_SENT: tuple[tuple[str, str, tuple[Payload, ...]], ...] = (
    ("after", "after", ()),
    ("streamed", "streamed", ()),
    ("5 payloads", "streamed", _CHOICES[: len(_SHARES)]),
    ("25 payloads", "streamed", _CHOICES),
)
HEADER = f"{'':<28}{'points':>8}{'fronts, ms':>14}{'round, ms (slowest)':>22}{'gap':>9}"


def streamed(instances: int, units: int, channels: int) -> Iterator[str]:
    """Yield a line for each law, drift and uplink."""
    for law in LAWS:
        for drift in ("gamma", "paper"):
            for name, uplink, payloads in _SENT:
                options = RoundOptions(
                    drift=drift, uplink=uplink, energy="adapters", segment_price="paper"
                )
                sizes = instances, units, channels
                yield _line(f"{law}, {drift}: {name}", law, options, payloads, *sizes)


def _line(
    name: str,
    law: Latency,
    options: RoundOptions,
    payloads: tuple[Payload, ...],
    instances: int,
    units: int,
    channels: int,
) -> str:
    fronts_s, rounds_s, points, gaps = list[float](), list[float](), list[int](), list[float]()
    for seed in range(instances):
        clusters, problem = _draw(np.random.default_rng(seed), law, options, units, channels)
        uplinks = tuple(replace(each, payloads=payloads) for each in problem.uplinks)
        problem = replace(problem, uplinks=uplinks)
        times = activation_times(problem.uplinks, problem.channels, options)
        clusters = [replace(c, activation_s=t) for c, t in zip(clusters, times, strict=True)]
        start = time.perf_counter()
        solved = [exact_partition(cluster) for cluster in clusters]
        fronts_s.append(time.perf_counter() - start)
        for solution, cluster in zip(solved, clusters, strict=True):
            verify_cluster(solution, cluster)
        problem = replace(problem, fronts=tuple(each.front for each in solved))
        exact_allocation(problem)  # warm-up
        start = time.perf_counter()
        answer = exact_allocation(problem)
        rounds_s.append(time.perf_counter() - start)
        verify_round(answer, problem)
        points.append(sum(map(len, problem.fronts)))
        gaps.append(answer.certificate.gap)
    front, middle, slowest = (
        1e3 * each
        for each in (statistics.median(fronts_s), statistics.median(rounds_s), max(rounds_s))
    )
    count = statistics.median(points)
    return f"{name:<28}{count:>8g}{front:>14.0f}{middle:>12.2f} ({slowest:>7.2f}){max(gaps):>9.0e}"


def _draw(
    rng: np.random.Generator, law: Latency, options: RoundOptions, units: int, channels: int
) -> tuple[list[ClusterProblem], RoundProblem]:
    gains = 10 ** ((-0.1 + 0.04 * rng.uniform(-0.5, 0.5, (units, channels))) / 10)
    bands = zip(rng.uniform(4e5, 6e5, channels), rng.uniform(0.06, 0.08, channels), strict=True)
    clusters = [heterogeneous(rng, NUM_DEVICES, NUM_BLOCKS, law) for _ in range(units)]
    problem = RoundProblem(
        fronts=((),) * units,
        uplinks=tuple(
            Uplink(0.5, 10.0, MODEL_BITS, ACTIVATION_BITS, tuple(each)) for each in gains.tolist()
        ),
        channels=tuple(Channel(float(b), float(i), 10**-20.4) for b, i in bands),
        queues=tuple(rng.uniform(0, 10, units).tolist()),
        error_queues=tuple(rng.uniform(0, 3, units).tolist()),
        num_blocks=NUM_BLOCKS,
        options=options,
    )
    return clusters, problem
