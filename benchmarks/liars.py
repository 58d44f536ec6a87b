"""Accuracy with each rule of the server if one of ten units sends false weights.

    python -m benchmarks.liars --data ../shared/data --seeds 3

The unit trains like the others. Then it sends the received weights plus a multiple of its change:
−1 (``flipped``), −4, whose norm is within the limit (``turned back``), or 1,000 (``scaled``).
Prints the accuracy on the test rows, with the smallest and largest of the seeds, and how often the
unit was excluded.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from flwr.clientapp import ClientApp

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from benchmarks.polarity import options, trained
from collapipe.tensors import Tensors
from tests.lying import Lying

UNITS, ROUNDS = 10, 12
LIAR = 3
RULES = {
    "mean, no limit": ("federation.max_update_norm=null",),
    "mean": (),
    "median": ("server_optimizer.average=median",),
    "trimmed mean": ("server_optimizer.average=trimmed_mean",),
}


def moved(factor: float) -> Callable[[Tensors, Tensors], Tensors]:
    """A function that multiplies a unit's change by the factor."""

    def lie(sent: Tensors, trained: Tensors) -> Tensors:
        return {name: sent[name] + factor * (each - sent[name]) for name, each in trained.items()}

    return lie


LIES = {"none": 1.0, "flipped": -1.0, "turned back": -4.0, "scaled": 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    arguments = parser.parse_intermixed_args()
    shared = options(arguments.data.resolve(), UNITS, ROUNDS) + arguments.overrides
    print(json.dumps({"machine": machine(), "overrides": shared}))
    for lie, factor in LIES.items():
        for rule, own in RULES.items():
            runs = [measured(factor, [*shared, *own, f"seed={s}"]) for s in range(arguments.seeds)]
            found, out = zip(*runs, strict=True)
            low, high = min(found), max(found)
            print(
                f"{lie:<12} {rule:<15} {statistics.mean(found):.3f} ({low:.3f}..{high:.3f}), "
                f"left out of {statistics.mean(out):.1f} of {ROUNDS} rounds",
                flush=True,
            )


def measured(factor: float, overrides: list[str]) -> tuple[float, int]:
    """Accuracy on the test rows, and the number of rounds that excluded the lying unit."""
    with tempfile.TemporaryDirectory() as folder:
        client = cast(ClientApp, Lying(moved(factor), {LIAR}))
        summary, lines = trained(Path(folder), overrides, client)
    return summary["metric"]["value"], sum(str(LIAR) in line["failures"] for line in lines)


if __name__ == "__main__":
    main()
