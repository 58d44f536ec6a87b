"""The planner against HiGHS, a scan of all deadlines, and the paper's own algorithms, in one run.

    python -m benchmarks.planner

First a line for each law of latency and size of cluster: our answer, which has the whole Pareto
front, then what HiGHS and Algorithm 2 take for one point, and how far their latencies lie from our
best. Then the joint round, once the fronts are known, and what the uplink as a stage adds to both.
One core; medians, and every answer verified.
"""

import argparse

import numpy as np
import scipy

from benchmarks.machine import machine
from benchmarks.planner_partition import partitions
from benchmarks.planner_round import Row, rows
from benchmarks.planner_streamed import HEADER, streamed


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--highs", type=int, default=20, help="instances for HiGHS, K=12")
    parser.add_argument("--highs-large", type=int, default=5, help="the same, K=48")
    parser.add_argument("--units", type=int, default=30)
    parser.add_argument("--channels", type=int, default=10)
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
