"""Sub-1: the exact partition against HiGHS, on the same clusters in one run.

    python -m benchmarks.planner_partition

Ours answers for all m up to 64 and all S; HiGHS is given the best m and answers for one point. Each
of its figures is therefore a lower bound of what the whole question would take. It is asked on a
few instances only, as the output says.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks.machine import machine
from optim.partition import exact_partition
from optim.problem import ClusterProblem, ClusterSolution, Latency
from tests.optim.instances import heterogeneous, paper_like
from tests.optim.partition_references import by_milp

SIZES = ((12, 24), (48, 96))
LAWS: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")


def timed(problem: ClusterProblem, repeats: int = 5) -> tuple[ClusterSolution, float]:
    """The solution and the fastest of some runs, ms."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        solution = exact_partition(problem)
        seconds.append(time.perf_counter() - start)
    return solution, 1e3 * min(seconds)


def by_highs(problem: ClusterProblem, solution: ClusterSolution) -> tuple[float, float]:
    """Its latency for our best m with at most our S, s, and how long it took, ms."""
    best = solution.best
    start = time.perf_counter()
    latency = by_milp(problem, best.num_micro_batches, best.num_segments)
    return latency, 1e3 * (time.perf_counter() - start)


def compare(name: str, problems: list[ClusterProblem], num_highs: int) -> None:
    """One line: medians, and how far apart the optima are."""
    solved = [timed(problem) for problem in problems]
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
        line += f", its optimum is {apart:+.1e} of ours"
    print(line, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--highs", type=int, default=20, help="instances that HiGHS solves, K=12")
    parser.add_argument("--highs-large", type=int, default=5, help="the same, K=48")
    options = parser.parse_args()
    print(machine() | {"numpy": np.__version__, "seeds": f"0 … {options.instances - 1}"})
    seeds = range(options.instances)
    for law in LAWS:
        for size, asked in zip(SIZES, (options.highs, options.highs_large), strict=True):
            rngs = (np.random.default_rng(seed) for seed in seeds)
            problems = [heterogeneous(rng, *size, law) for rng in rngs]
            compare(f"{law} K={size[0]} L={size[1]}", problems, asked)
        problems = [paper_like(np.random.default_rng(seed), law) for seed in seeds]
        compare(f"{law} paper K=6 L=12", problems, options.highs)


if __name__ == "__main__":
    main()
