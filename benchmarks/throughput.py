"""Target tokens per second: CollaPipe against ``vanilla_fl`` and an ordinary PyTorch loop.

    python benchmarks/throughput.py --output outputs/throughput [OVERRIDES]

The same batches, model and cores on all sides, which take turns. The federated sides count whole
rounds but the first, messages and aggregation included; the loop counts its steps alone. Prints a
table of medians and ratios, where a unit's time goes, and writes ``throughput.json``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from machine import machine
from ordinary import Ordinary, use_threads

from collapipe.config import load_overrides

SIZES = ["model.dim=256", "model.feed_forward_dim=1024", "model.num_decoder_blocks=6"]
ROUNDS = ["federation.rounds=4", "federation.local_steps=4", "federation.eval_every=99"]
SMALL_TEST = ["task.validation_rows=2", "task.test_rows=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/throughput"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="instead of 256-wide 6+6 blocks")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    overrides = [*(arguments.overrides or SIZES), *ROUNDS, *SMALL_TEST]
    speeds: dict[str, list[float]] = {"collapipe": [], "vanilla_fl": [], "ordinary": []}
    phases: dict[str, dict[str, float]] = {}
    for turn in range(arguments.turns):
        for framework in ("collapipe", "vanilla_fl"):
            folder = (arguments.output / f"{framework}-{os.getpid()}-{turn}").resolve()
            federated(framework, overrides, folder)
            lines = read(folder)[1:]
            seconds = sum(line["seconds"]["round"] for line in lines)
            speeds[framework].append(sum(line["target_tokens"] for line in lines) / seconds)
            phases[framework] = median_phases(lines)
        speeds["ordinary"].append(ordinary(overrides))
    report(speeds, phases)
    result = {"speeds": speeds, "phases": phases, "overrides": overrides, "machine": machine()}
    (arguments.output / "throughput.json").write_text(json.dumps(result, indent=2) + "\n")


def federated(framework: str, overrides: list[str], folder: Path) -> None:
    """A run in a process of its own."""
    options = [f"framework={framework}", *overrides, f"hydra.run.dir='{folder}'"]
    command = [sys.executable, "-m", "collapipe", "run", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median_phases(lines: list[dict]) -> dict[str, float]:
    names = lines[0]["seconds"]
    return {name: statistics.median(line["seconds"][name] for line in lines) for name in names}


def ordinary(overrides: list[str]) -> float:
    """Tokens per second of the loop, with all cores, after a round of warm-up."""
    use_threads(os.cpu_count() or 1)
    settings = load_overrides(overrides)
    loop = Ordinary.prepare(settings)
    marks: list[tuple[int, float]] = []
    loop.train(unions=False, each_batch=lambda *mark: marks.append(mark))
    warm = settings.federation.local_steps * settings.federation.num_units
    return sum(tokens for tokens, _ in marks[warm:]) / sum(s for _, s in marks[warm:])


def report(speeds: dict[str, list[float]], phases: dict[str, dict[str, float]]) -> None:
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    print(
        f"{'side':<12} {'tokens/s':>9} {'least':>9} {'most':>9}   collapipe / side, median of turns"
    )
    for side, values in speeds.items():
        ratios = [a / b for a, b in zip(speeds["collapipe"], values, strict=True)]
        print(
            f"{side:<12} {medians[side]:>9,.0f} {min(values):>9,.0f} {max(values):>9,.0f}"
            f"   {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        )
    print("\nseconds of a round, of the mean unit in it (unit/…), by phase")
    names = sorted({name for each in phases.values() for name in each})
    for name in names:
        row = "  ".join(f"{phases[side].get(name, 0.0):>10.3f}" for side in phases)
        print(f"{name:<16} {row}")
    print(f"{'':<16} " + "  ".join(f"{side:>10}" for side in phases))


if __name__ == "__main__":
    main()
