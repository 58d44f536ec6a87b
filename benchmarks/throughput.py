"""Target tokens per second: CollaPipe against ``vanilla_fl`` and an ordinary PyTorch loop.

    python benchmarks/throughput.py --output outputs/throughput [OVERRIDES]

All sides use the same batches, model and cores, and take turns. The federated sides count all
rounds except the first, including messages and aggregation; the loop counts only its steps. Prints
a table of medians and ratios and the phases of a unit's time, and writes ``throughput.json``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from arguments import at_least, writable
from machine import record
from ordinary import Ordinary, use_threads

from collapipe.config import load_overrides

WIDTHS = {
    "256": ["model.dim=256", "model.feed_forward_dim=1024", "model.num_decoder_blocks=6"],
    "64": ["model.dim=64", "model.feed_forward_dim=256", "model.num_decoder_blocks=6"],
}
FRAMEWORKS = ["collapipe", "vanilla_fl"]
COLUMNS = ["width", "side", "tokens/s", "least", "most", "first / side"]
ROUNDS = ["federation.rounds=4", "federation.local_steps=4", "federation.eval_every=99"]
SMALL_TEST = ["task.validation_rows=2", "task.test_rows=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/throughput"))
    parser.add_argument("--turns", type=at_least(1), default=5)
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=["256"])
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--load", default="unknown", help="other work of this machine")
    parser.add_argument("overrides", nargs="*", help="instead of 6+6 blocks of a width")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    own = arguments.overrides
    sizes = {"own": own} if own else {width: WIDTHS[width] for width in arguments.widths}
    rows, details = [], {}
    for width, options in sizes.items():
        overrides = [*options, *ROUNDS, *SMALL_TEST]
        speeds, phases = measured(overrides, arguments, arguments.output / width)
        rows += report(width, speeds, phases)
        details[width] = {"speeds": speeds, "phases": phases, "overrides": overrides}
    found = record(arguments.load, [0], COLUMNS, rows)
    result = {**found, "details": details}
    (arguments.output / "throughput.json").write_text(json.dumps(result, indent=2) + "\n")


def measured(
    overrides: list[str], arguments: argparse.Namespace, output: Path
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Tokens per second of each side in each turn, and seconds of a round's phases."""
    speeds: dict[str, list[float]] = {side: [] for side in (*arguments.frameworks, "ordinary")}
    phases: dict[str, dict[str, float]] = {}
    for turn in range(arguments.turns):
        for framework in arguments.frameworks:
            folder = Path(f"{output}-{framework}-{os.getpid()}-{turn}").resolve()
            federated(framework, overrides, folder)
            lines = read(folder)[1:]
            seconds = sum(line["seconds"]["round"] for line in lines)
            speeds[framework].append(sum(line["target_tokens"] for line in lines) / seconds)
            phases[framework] = median_phases(lines)
        speeds["ordinary"].append(ordinary(overrides))
    return speeds, phases


def federated(framework: str, overrides: list[str], folder: Path) -> None:
    """Run in a separate process."""
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


def report(
    width: str, speeds: dict[str, list[float]], phases: dict[str, dict[str, float]]
) -> list[list[str]]:
    """Print the figures of a width, and return a row for each side."""
    rows, first = [], next(iter(speeds.values()))
    print(" | ".join(COLUMNS))
    for side, values in speeds.items():
        ratios = [a / b for a, b in zip(first, values, strict=True)]
        speed = [f"{each:,.0f}" for each in (statistics.median(values), min(values), max(values))]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        rows.append([width, side, *speed, ratio])
        print(" | ".join(rows[-1]))
    print("\nseconds of a round, of the mean unit in it (unit/…), by phase")
    names = sorted({name for each in phases.values() for name in each})
    for name in names:
        row = "  ".join(f"{phases[side].get(name, 0.0):>10.3f}" for side in phases)
        print(f"{name:<16} {row}")
    print(f"{'':<16} " + "  ".join(f"{side:>10}" for side in phases), flush=True)
    return rows


if __name__ == "__main__":
    main()
