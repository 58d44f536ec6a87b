"""Test losses of runs that differ in some options, paired by seed."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from benchmarks.language_models.runs import run


def paired(
    arguments: Namespace, shared: Sequence[str], sides: Mapping[str, Sequence[str]]
) -> dict[str, list[float]]:
    """Run each side with ``arguments.seeds`` seeds, and print its mean test loss with the mean
    difference to the first side and its 95 % interval."""
    losses = {side: list[float]() for side in sides}
    for seed in range(arguments.seeds):
        for side, own in sides.items():
            folder = arguments.output / f"{side}-{seed}"
            run(folder, [*shared, *own, f"seed={seed}"])
            losses[side].append(json.loads((folder / "summary.json").read_text())["test_loss"])
            print(f"{side} seed {seed}: test loss {losses[side][-1]:.4f}", flush=True)
    first = next(iter(losses.values()))
    for side, found in losses.items():
        apart = np.array(found) - np.array(first)
        half = stats.sem(apart) * stats.t.ppf(0.975, len(apart) - 1)
        low, high = apart.mean() - half, apart.mean() + half
        print(f"{side:<8} {np.mean(found):.4f}  {apart.mean():+.4f} ({low:+.4f} … {high:+.4f})")
    return losses
