"""README's example on daemons of this machine against the same run in one process, in turns.
Measures samples per second of training in later rounds, and seconds from a round's start to its
first micro-batch."""

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least
from benchmarks.devices.predictions import Setting, daemons_of, measuring_s, run_lines
from benchmarks.devices.sides import save
from benchmarks.machine import record

_SHORT = "federation.eval_every=99", "task.test_rows=4", "task.validation_rows=4"
_INLINE = "one process"
COLUMNS = ["side", "samples/s", f"of {_INLINE}", "round, s", "start, s", "micro-batches"]
_Lines = list[dict[str, Any]]  # lines of a run's rounds from the second one on


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, rounds and options."""
    parser.add_argument("--devices", type=at_least(1), default=3)
    parser.add_argument("--rounds", type=at_least(1), default=4)
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--measured", action="store_true", help="Measure the inventory before.")
    parser.add_argument("--load", default="unknown", help="Other work of this machine.")


def main(arguments: Namespace) -> None:
    setting = Setting(devices=arguments.devices)
    own = "federation.num_units=1", f"federation.rounds={arguments.rounds}", *_SHORT
    with tempfile.TemporaryDirectory() as folder, daemons_of(setting, Path(folder)) as inventory:
        on_them = "cluster=devices", f"cluster.file={inventory}"
        if arguments.measured:
            measuring_s(inventory, (own[0], "pipeline.threads=1", *arguments.options))
        sides: dict[str, tuple[str, ...]] = {
            f"{arguments.devices} daemons": (*on_them, "pipeline.threads=1"),
            _INLINE: (),
        }
        rounds: dict[str, list[_Lines]] = {side: [] for side in sides}
        for turn in range(arguments.turns):
            for number, (side, options) in enumerate(sides.items()):
                run = Path(folder, f"run-{turn}-{number}")
                lines = run_lines(run, *own, *options, *arguments.options)
                rounds[side].append(lines[1:])
    speeds = {side: [*map(_speed, found)] for side, found in rounds.items()}
    rows = [[side, *_cells(rounds[side], speeds[side], speeds[_INLINE])] for side in rounds]
    print("\n".join(" | ".join(row) for row in (COLUMNS, *rows)))
    aim = f"samples/s ≥ 0.95 of {_INLINE}, start ≤ 0.05 s"
    found = {**record(arguments.load, [0], COLUMNS, rows), "aim": aim}
    save(arguments.output, "one_machine", found)


def _speed(lines: _Lines) -> float:
    """Samples per second of training."""
    taken = sum(each["seconds"]["train"] for each in lines)
    return float(sum(each["samples"] for each in lines) / taken)


def _cells(turns: list[_Lines], speeds: list[float], inline: list[float]) -> list[str]:
    lines = [*chain.from_iterable(turns)]
    cut = sorted({each["plan"]["clusters"][0]["num_micro_batches"] for each in lines})
    return [
        f"{statistics.median(speeds):,.0f}",
        _range([a / b for a, b in zip(speeds, inline, strict=True)], 2),
        _range([each["seconds"]["train"] for each in lines], 2),
        _range([each["seconds"]["unit/start"] for each in lines], 3),
        ", ".join(map(str, cut)),
    ]


def _range(found: list[float], digits: int) -> str:
    """The median, with minimum and maximum."""
    least, most = min(found), max(found)
    return f"{statistics.median(found):.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"
