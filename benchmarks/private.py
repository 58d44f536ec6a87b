"""What privacy costs: accuracy against ε, thirty units, adapters in MiniLM's last block.

    python -m benchmarks.private --data ../shared/data --seeds 3

Each unit has 66 sentences and takes one step with all of them in each round. ``none`` averages
updates as they are, ``clipped`` clips them, the others add the noise that comes to ε after the last
round, of the operating system's source. Prints the accuracy on the test rows, with the smallest and
largest of the seeds. A run takes some two minutes of a core, and 7 GB.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path

import dp_accounting

from benchmarks.machine import machine
from benchmarks.polarity import options, trained

UNITS, ROUNDS, DELTA = 30, 15, 1e-3
EPSILONS = 64.0, 16.0, 8.0, 2.0
STEP = ("batch_size=66", "federation.local_steps=1", "federation.weighting=uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clip-norm", type=float, default=0.3)
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    arguments = parser.parse_intermixed_args()
    shared = [*options(arguments.data.resolve(), UNITS, ROUNDS), *STEP, *arguments.overrides]
    print(json.dumps({"machine": machine(), "overrides": shared}))
    clipped = [f"privacy.clip_norm={arguments.clip_norm}", "federation.max_update_norm=null"]
    rules = {"none": [], "clipped": clipped}
    for epsilon in EPSILONS:
        noise = dp_accounting.get_sigma_gaussian(epsilon, DELTA) * math.sqrt(ROUNDS)
        told = [f"privacy.noise_multiplier={noise}", f"privacy.delta={DELTA}"]
        rules[f"epsilon {epsilon:g}"] = [*clipped, *told]
    for name, own in rules.items():
        found = [accuracy([*shared, *own, f"seed={seed}"]) for seed in range(arguments.seeds)]
        low, high = min(found), max(found)
        print(f"{name:<12} {statistics.mean(found):.3f} ({low:.3f}..{high:.3f})", flush=True)


def accuracy(overrides: list[str]) -> float:
    """Of the test rows, after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        summary, _ = trained(Path(folder), overrides)
    return float(summary["metric"]["value"])


if __name__ == "__main__":
    main()
