"""The joint round, solved exactly, against a scan of all deadlines and the paper's Algorithm 3.

Clusters' fronts are given, with S up to 8. Uplinks follow the paper's Table II with adapters of 1.2
MB; with `wide`, gains vary over 10 dB and only some pairs have enough energy. The scan solves one
assignment for each deadline. Under drift gamma, deadlines are the finish times of all options,
which is exact too. Under drift paper, deadlines are continuous, and the scan tries 2,000 equally
spaced ones. Algorithm 3 computes power with CVXPY. Every solution is verified. Times are medians
over the instances, with the slowest in brackets.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment as assign

from collapipe.state import Channel, Uplink
from optim.allocation import matching
from optim.allocation.algorithm3 import paper_allocation
from optim.allocation.exact import exact_allocation
from optim.allocation.options import OptionTable, option_table
from optim.problem import Partition
from optim.round.channel import required_snr
from optim.round.convergence import idle_gamma, interference_error, scheduled_gamma
from optim.round.problem import RoundOptions, RoundProblem
from optim.verify import verify_round

Floats = NDArray[np.float64]

NUM_BLOCKS, MOST_SEGMENTS, SCANNED_DEADLINES = 12, 8, 2000
NOISE_W_PER_HZ = 10**-20.4
MISSING = 1e9


@dataclass(frozen=True)
class Row:
    """A line of the table: seconds, assignments, objectives and gaps of all instances."""

    HEADER: ClassVar[str] = (
        f"{'':<28}{'median ms (slowest)':>20}{'assigned':>10}{'mean objective':>16}{'gap':>9}"
    )

    name: str
    seconds: list[float]
    assignments: list[int]
    objectives: list[float]
    gaps: list[float]

    def line(self) -> str:
        milliseconds = [1e3 * each for each in self.seconds]
        return (
            f"{self.name:<28}{statistics.median(milliseconds):>9.2f} ({max(milliseconds):>8.2f})"
            f"{statistics.median(self.assignments):>10g}{statistics.fmean(self.objectives):>16.6f}"
            f"{max(self.gaps, default=0):>9.0e}"
        )


def rows(instances: int, units: int, channels: int, seed: int = 0) -> Iterator[Row]:
    """Yield a row for each solver on the same instances. There is no scan with fading, because it
    takes minutes."""
    for drift, fading, wide in (
        ("gamma", "none", False),
        ("gamma", "none", True),
        ("paper", "none", False),
        ("paper", "none", True),
        ("gamma", "rayleigh", False),
        ("paper", "rayleigh", False),
    ):
        rng = np.random.default_rng(seed)
        options = RoundOptions(drift=drift, fading=fading, segment_price="paper")
        problems = [draw(rng, units, channels, options, wide) for _ in range(instances)]
        name = f"{drift}{', fading' if fading == 'rayleigh' else ''}{', wide' if wide else ''}"
        yield measure(f"{name}: ours", problems, ours)
        yield measure(f"{name}: Algorithm 3", problems, papers)
        if fading == "none":
            scan = scan_gamma if drift == "gamma" else scan_paper
            yield measure(f"{name}: scan", problems, scan)


def draw(
    rng: np.random.Generator, units: int, channels: int, options: RoundOptions, wide: bool
) -> RoundProblem:
    """A random problem: N units with fronts of 3 to 8 points, J channels, queues up to 10."""
    spread = 10.0 if wide else 0.04
    gains = 10 ** ((-0.1 + spread * rng.uniform(-0.5, 0.5, (units, channels))) / 10)
    energy = 4.0 if wide else 10.0
    bands = zip(rng.uniform(4e5, 6e5, channels), rng.uniform(0.06, 0.08, channels), strict=True)
    return RoundProblem(
        fronts=tuple(_front(rng) for _ in range(units)),
        uplinks=tuple(Uplink(0.5, energy, 9.6e6, 0.0, tuple(each)) for each in gains.tolist()),
        channels=tuple(Channel(float(b), float(i), NOISE_W_PER_HZ) for b, i in bands),
        queues=tuple(rng.uniform(0, 10, units).tolist()),
        num_blocks=NUM_BLOCKS,
        options=options,
    )


def _front(rng: np.random.Generator) -> tuple[Partition, ...]:
    count = int(rng.integers(3, MOST_SEGMENTS + 1))
    latencies = rng.uniform(100, 300) * np.cumprod([1.0, *rng.uniform(0.6, 0.95, count - 1)])
    points = enumerate(latencies.tolist(), start=1)
    return tuple(
        Partition((NUM_BLOCKS + 1 - s,) + (1,) * (s - 1) + (0,) * (12 - s), 8, latency)
        for s, latency in points
    )


def measure(
    name: str, problems: list[RoundProblem], solve: Callable[[RoundProblem], tuple[float, float]]
) -> Row:
    """Solve each instance once for the time and once to count assignments, after a warm-up."""
    solve(problems[0])
    row = Row(name, [], [], [], [])
    for problem in problems:
        start = time.perf_counter()
        objective, gap = solve(problem)
        row.seconds.append(time.perf_counter() - start)
        row.objectives.append(objective)
        row.gaps.append(gap)
        if solve in (ours, papers):
            answer = exact_allocation(problem) if solve is ours else paper_allocation(problem)
            verify_round(answer, problem)
        with mock.patch.object(matching, "linear_sum_assignment", wraps=assign) as counter:
            solve(problem)
        row.assignments.append(counter.call_count)
    return row


def ours(problem: RoundProblem) -> tuple[float, float]:
    """Objective and gap of our solution."""
    certificate = exact_allocation(problem).certificate
    return certificate.objective, certificate.gap


def papers(problem: RoundProblem) -> tuple[float, float]:
    """Objective of Algorithm 3, which computes no gap."""
    return paper_allocation(problem).certificate.objective, math.nan


def scan_gamma(problem: RoundProblem) -> tuple[float, float]:
    """The best objective over all finish times."""
    options, idle = option_table(problem), idle_gamma(problem.channels, problem.options)
    pairs, constant = options.pairs.at(0), problem.options.interference_constant_w
    (finish_s,), (limits_w,) = options.finish_s, options.limits_w  # one payload
    error = interference_error(limits_w, pairs.gains, pairs.interference_w, constant)
    gammas = scheduled_gamma(options.points.segments, error, NUM_BLOCKS, problem.options)
    costs = np.array(problem.queues)[:, np.newaxis] * (gammas - idle)

    def at(deadline: float) -> Floats:
        return np.where(finish_s <= deadline, costs, MISSING)

    deadlines = np.unique(finish_s[np.isfinite(finish_s)])
    best = _scan(at, deadlines, problem.options.drift_weight)
    return best + idle * sum(problem.queues), math.nan


def scan_paper(problem: RoundProblem) -> tuple[float, float]:
    """The best objective over equally spaced deadlines, up to twice the last finish at full
    power."""
    options = option_table(problem)
    finish = options.finish_s[np.isfinite(options.finish_s)]

    def at(deadline: float) -> Floats:
        return _slowest(problem, options, deadline)

    deadlines = np.linspace(finish.min(), 2 * finish.max(), SCANNED_DEADLINES)
    return _scan(at, deadlines, problem.options.drift_weight), math.nan


def _slowest(problem: RoundProblem, options: OptionTable, deadline: float) -> Floats:
    """Costs at the least power that meets the deadline, [S, N, J]."""
    pairs, feasible = options.pairs.at(0), options.finish_s[0] <= deadline
    seconds = np.where(feasible, deadline - options.points.latency_s, 1.0)
    nats = pairs.upload_bits * np.log(2) / pairs.bandwidth_hz / seconds
    snr, _ = required_snr(np.where(feasible, nats, 1.0), pairs.fading)
    power = snr / pairs.snr_per_watt
    queues = np.array(problem.queues)[:, np.newaxis]
    return np.where(feasible, queues * (options.points.segments + power), MISSING)


def _scan(at: Callable[[float], Floats], deadlines: Floats, weight: float) -> float:
    best = np.inf
    for deadline in deadlines:
        least = at(deadline).min(axis=0)
        units, channels = matching.linear_sum_assignment(least)
        best = min(best, weight * float(deadline) + float(least[units, channels].sum()))
    return best
