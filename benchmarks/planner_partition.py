"""Sub-1: the exact partition against HiGHS and the paper's Algorithm 2 on the same clusters.

Our solver returns the solutions for all m up to 64 and all S. HiGHS receives the best m and solves
one point, so its times are lower bounds of the whole problem's times. It only runs on a few
instances; the output shows their number. Algorithm 2, which calls HiGHS repeatedly, takes minutes
for K=48 and is omitted there.
"""

import statistics
import time

import numpy as np

from optim.partition.algorithm2 import alternate, paper_partition, starting_micro_batches
from optim.partition.exact import exact_partition
from optim.partition.single_point import split_latency
from optim.problem import ClusterProblem, ClusterSolution, Latency
from optim.verify import verify_cluster
from tests.optim.instances import heterogeneous, paper_like, uneven
from tests.optim.partition_references import by_milp

SIZES = ((12, 24), (48, 96))
LAWS: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")


def timed(problem: ClusterProblem, repeats: int = 5) -> tuple[ClusterSolution, float]:
    """The solution, and the milliseconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        solution = exact_partition(problem)
        seconds.append(time.perf_counter() - start)
    return solution, 1e3 * min(seconds)


def by_highs(problem: ClusterProblem, solution: ClusterSolution) -> tuple[float, float]:
    """Latency, s, for our best m and at most our S, and the solver's time, ms."""
    best = solution.best
    start = time.perf_counter()
    latency = by_milp(problem, best.num_micro_batches, best.num_segments)
    return latency, 1e3 * (time.perf_counter() - start)


def by_alternation(problem: ClusterProblem) -> tuple[float, float]:
    """Latency of Algorithm 2's solution, s, and its time, ms."""
    start = time.perf_counter()
    solution = paper_partition(problem, np.random.default_rng(0))
    milliseconds = 1e3 * (time.perf_counter() - start)
    verify_cluster(solution, problem)
    return solution.best.latency_s, milliseconds


def compare(
    name: str, problems: list[ClusterProblem], num_highs: int, alternate: bool = True
) -> None:
    """Print a line with medians and the differences of the optima."""
    solved = [timed(problem) for problem in problems]
    for problem, (solution, _) in zip(problems, solved, strict=True):
        verify_cluster(solution, problem)
    ours = [milliseconds for _, milliseconds in solved]
    points = statistics.median(len(solution.front) for solution, _ in solved)
    line = f"{name:28s} ours {statistics.median(ours):7.2f} ms (at most {max(ours):6.2f})"
    line += f", front of {points:4.1f} points"
    if num_highs:
        theirs = [
            (*by_highs(problem, solution), solution.best.latency_s)
            for problem, (solution, _) in zip(problems[:num_highs], solved, strict=False)
        ]
        apart = max(found / latency - 1 for found, _, latency in theirs)
        spent = statistics.median(milliseconds for _, milliseconds, _ in theirs)
        line += f" | HiGHS, one point, {num_highs} instances: {spent:9.1f} ms"
        line += f", {apart:+.1e}"
    if alternate:
        reached = [by_alternation(problem) for problem in problems[:num_highs]]
        above = [
            latency / solution.best.latency_s - 1
            for (latency, _), (solution, _) in zip(reached, solved, strict=False)
        ]
        spent = statistics.median(milliseconds for _, milliseconds in reached)
        line += f" | Algorithm 2: {spent:7.1f} ms, {statistics.fmean(above):+.2%} in the mean"
    print(line, flush=True)


def starts(name: str, problems: list[ClusterProblem]) -> None:
    """Print a line: how far Algorithm 2 ends above the optimum, from each start and with both."""
    above = []
    for problem in problems:
        least = exact_partition(problem).best.latency_s
        splits = [alternate(problem, m) for m in starting_micro_batches(problem)]
        ends = [split_latency(problem, *split) / least - 1 for split in splits]
        above.append([*ends, min(ends)])
    means, worst = np.mean(above, axis=0), np.max(above, axis=0)
    named = zip(("printed start", "even split's", "better of both"), means, worst, strict=True)
    parts = [
        f"{start} {mean:+.1%} in the mean, {most:+.0%} at worst" for start, mean, most in named
    ]
    print(f"{name:28s} Algorithm 2 from the {'; '.join(parts)}", flush=True)


def partitions(instances: int, highs: int, highs_large: int) -> None:
    """Print a line for each law and size."""
    seeds = range(instances)
    for law in LAWS:
        for size, num_highs in zip(SIZES, (highs, highs_large), strict=True):
            rngs = (np.random.default_rng(seed) for seed in seeds)
            problems = [heterogeneous(rng, *size, law) for rng in rngs]
            compare(f"{law} K={size[0]} L={size[1]}", problems, num_highs, size[0] < 48)
        problems = [paper_like(np.random.default_rng(seed), law) for seed in seeds]
        compare(f"{law} Table II K=6 L=12", problems, highs)
        problems = [uneven(np.random.default_rng(seed), law) for seed in range(highs)]
        starts(f"{law} uneven K=6 L=12", problems)
