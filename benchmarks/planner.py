"""The planner against HiGHS, a scan of all deadlines, and the paper's algorithms, in one run.

    python -m benchmarks.planner

First prints a line for each law of latency and size of cluster. It shows the time of our solution,
which is the whole Pareto front, and the times of HiGHS and Algorithm 2 for one point. It also shows
how far their latencies are from our best. Then prints the joint round with known fronts, and the
additional time for both problems if the uplink is a stage. One core; medians; every solution is
verified.
"""

import argparse

import numpy as np
import scipy

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from benchmarks.planner_partition import partitions
from benchmarks.planner_round import Row, rows
from benchmarks.planner_streamed import HEADER, streamed


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=at_least(1), default=20)
    parser.add_argument("--highs", type=int, default=20, help="instances for HiGHS, K=12")
    parser.add_argument("--highs-large", type=int, default=5, help="the same, K=48")
    parser.add_argument("--units", type=at_least(1), default=30)
    parser.add_argument("--channels", type=at_least(1), default=10)
    options = parser.parse_args()
    versions = {"numpy": np.__version__, "scipy": scipy.__version__}
    print(machine() | versions | {"seeds": f"0 … {options.instances - 1}"})
    partitions(options.instances, options.highs, options.highs_large)
    print(f"the round, N={options.units} J={options.channels} S≤8")
    print(Row.HEADER)
    for row in rows(options.instances, options.units, options.channels):
        print(row.line(), flush=True)
    print(f"uploads after and beside the pipeline, N={options.units} J={options.channels}")
    print(HEADER)
    for line in streamed(options.instances, options.units, options.channels):
        print(line, flush=True)


if __name__ == "__main__":
    main()
