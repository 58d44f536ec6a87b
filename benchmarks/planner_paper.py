"""What splitting by CollaPipe cuts from a cluster's delay, and how near its paper's way comes.

    python benchmarks/planner_paper.py [--clusters 300] [--seed 0]

Draws clusters as Table II of the paper describes them and prints, under every law of latency, the
cut of the mean delay against each baseline on the same clusters, with its 95 % interval over
clusters, and the alternation of Algorithm 2 beside the exact optimum. Once as the table has it,
with memory and energy, where a baseline may break a cap (those clusters are left out of its row,
and counted), and once without. Uplinks are no part of it.
"""

import argparse
import dataclasses
import math
import os
import platform
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import InfeasibleRoundError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget
from optim.problem import ClusterProblem, Latency
from optim.solvers import CLUSTER_SOLVERS, cluster_solver

Floats = NDArray[np.float64]

NUM_DEVICES, NUM_BLOCKS, BATCH_SIZE, MICRO_BATCHES = 6, 12, 64, 64
MFLOP_PER_BLOCK = 2.0  # o = o', per sample forward and per micro-batch backward, as eq. 15 has it
ACTIVATION_BITS = 64 * 768 * 32
MEMORY_BLOCKS = 6
ENERGY_J = 5.0
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"K={NUM_DEVICES} L={NUM_BLOCKS} b={BATCH_SIZE} m=1..{MICRO_BATCHES}", end="; ")
    print(f"{arguments.clusters} clusters, seed {arguments.seed}", end="; ")
    print(f"{os.cpu_count()} cores, python {platform.python_version()}, numpy {np.__version__}")
    for latency in get_args(Latency):
        for caps in (True, False):
            rng = np.random.default_rng(arguments.seed)
            clusters = [table_ii_cluster(rng, latency, caps) for _ in range(arguments.clusters)]
            report(latency, caps, clusters, rng)


def table_ii_cluster(
    rng: np.random.Generator, latency: Latency, caps: bool = True
) -> ClusterProblem:
    """K devices of Table II: φ ∈ [10, 24] MFLOP/s per unit of f ∈ [0.1, 0.8], hops of eq. 13."""
    devices = tuple(_device(rng, f"device-{k}") for k in range(NUM_DEVICES))
    if not caps:
        devices = tuple(dataclasses.replace(d, max_blocks=None, energy=None) for d in devices)
    return ClusterProblem(devices, NUM_BLOCKS, BATCH_SIZE, MICRO_BATCHES, latency)


def _device(rng: np.random.Generator, name: str) -> DeviceProfile:
    phi, f, power_w = rng.uniform(10, 24), rng.uniform(0.1, 0.8), rng.uniform(0.07, 0.1)
    bandwidth_hz = 0.5e6
    snr = power_w * 10 ** (-30 / 10) / (5e-10 + bandwidth_hz * 10 ** (-174 / 10) / 1e3)
    hop_s = 2 * ACTIVATION_BITS / (bandwidth_hz * math.log2(1 + snr))
    block_s = MFLOP_PER_BLOCK / (phi * f)
    block_j = MFLOP_PER_BLOCK * f**2 / phi
    return DeviceProfile(
        name,
        AffineLaw(block_s, block_s, 0.0, hop_s),
        MEMORY_BLOCKS,
        EnergyBudget(ENERGY_J, AffineLaw(block_j, block_j, 0.0, power_w * hop_s), "micro_batch"),
    )


def report(
    latency: str, caps: bool, clusters: Sequence[ClusterProblem], rng: np.random.Generator
) -> None:
    """One table: a row a solver."""
    print(f"\n{latency}, {'memory and energy as in Table II' if caps else 'no caps'}")
    print(f"{'against':22} {'clusters':>8} {'cut of mean':>12} {'95 % interval':>16}", end="")
    print(f" {'mean cut':>9} {'ms':>7}")
    exact = solve("exact", clusters, rng)
    for name in CLUSTER_SOLVERS:
        answers = solve(name, clusters, rng) if name != "exact" else exact
        print(row(name, exact[:, 0], answers, rng))


def solve(name: str, clusters: Sequence[ClusterProblem], rng: np.random.Generator) -> Floats:
    """Latency and solve time of each cluster, [clusters, 2]; NaN where it is infeasible."""
    answers = np.full((len(clusters), 2), np.nan)
    for answer, cluster in zip(answers, clusters, strict=True):
        try:
            solution = cluster_solver(name)(cluster, rng)
        except InfeasibleRoundError:
            continue
        answer[:] = solution.best.latency_s, solution.certificate.solve_time_s
    return answers


def row(name: str, exact: Floats, answers: Floats, rng: np.random.Generator) -> str:
    """The cut of the mean delay with its interval, and the mean of the cuts, in percent."""
    kept = np.isfinite(exact) & np.isfinite(answers[:, 0])
    if not kept.any():
        return f"{name:22} {0:8}"
    ours, theirs = exact[kept], answers[kept, 0]
    draws = rng.integers(kept.sum(), size=(RESAMPLES, kept.sum()))
    low, high = np.percentile(100 * (1 - ours[draws].sum(1) / theirs[draws].sum(1)), [2.5, 97.5])
    cut, mean = 100 * (1 - ours.sum() / theirs.sum()), 100 * np.mean(1 - ours / theirs)
    milliseconds = 1e3 * np.median(answers[kept, 1])
    near = np.mean(theirs <= 1.001 * ours)
    return (
        f"{name:22} {kept.sum():8} {cut:11.2f}% {low:7.2f} … {high:5.2f}% {mean:8.2f}% "
        f"{milliseconds:7.2f}" + (f"   {near:.1%} within 0.1 %" if name == "paper" else "")
    )


if __name__ == "__main__":
    main()
