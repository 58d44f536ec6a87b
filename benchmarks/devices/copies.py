"""Cost of copies of adapters on the control unit in whole runs with LoRA, from the second round on.

Prints seconds of a step and bytes of copies by ``pipeline.replicate_every``, in a stage that all
devices share and in a pipeline of single devices. All runs take turns.
"""

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import product
from pathlib import Path
from unittest.mock import patch

from benchmarks.arguments import at_least
from benchmarks.devices.predictions import Setting, daemons_of, read_lines
from benchmarks.devices.sides import save
from benchmarks.machine import record
from collapipe.cli.run import run_job
from collapipe.config import load_overrides
from collapipe.wire.frames import Frame
from pipeline.devices.control_unit.replica import Replica

_OPTIONS = (
    *("adapter=lora", "decoder.mode=control_unit", "federation.num_units=1"),
    *("pipeline.threads=1", "federation.eval_every=99"),
    *("task.test_rows=4", "task.validation_rows=4"),
)
PLANS = {"one shared stage": "framework=vanilla_fl", "single devices": "strategy.sharing=never"}
EVERY = "auto", "1", "0"
COLUMNS = [
    *("plan", "`replicate_every`", "a step, ms", "copies of a step, kB", "copies a round"),
    *("hops of a step, kB", "segments"),
]


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for links, quotas, rounds and options."""
    parser.add_argument("--mbit", type=float, help="Of each link; without it one machine.")
    parser.add_argument("--cores", type=float, default=0.4, help="Of a device behind a link.")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=[*PLANS])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--load", default="unknown", help="Other work of this machine.")


@dataclass
class _Side:
    """Figures of the runs with one plan and one interval of copies."""

    step_ms: list[float] = field(default_factory=list)
    copies_kb: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)  # number per round
    hops_kb: list[float] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)


def main(arguments: Namespace) -> None:
    setting = Setting((), 3, arguments.mbit, cores=(arguments.cores,) * 3)
    sides = {each: _Side() for each in product(arguments.plans, EVERY)}
    with tempfile.TemporaryDirectory() as folder, daemons_of(setting, Path(folder)) as inventory:
        there = "cluster=devices", f"cluster.file={inventory}", *_OPTIONS, *arguments.options
        for turn in range(arguments.turns):
            in_turn = sides if turn % 2 == 0 else reversed(sides)  # so that the order has no effect
            for number, (plan, every) in enumerate(in_turn):
                own = PLANS[plan], f"pipeline.replicate_every={every}"
                rounds = f"federation.rounds={arguments.rounds}"
                run = Path(folder, f"run-{turn}-{number}")
                _run([*there, *own, rounds], run, sides[plan, every])
    rows = [[*names, *_cells(side)] for names, side in sides.items()]
    print("\n".join(" | ".join(row) for row in (COLUMNS, *rows)))
    save(arguments.output, "copies", record(arguments.load, [0], COLUMNS, rows))


def _run(options: list[str], folder: Path, side: _Side) -> None:
    steps = load_overrides(options).federation.local_steps
    with _counting() as counted, redirect_stdout(StringIO()):
        run_job([*options, f"hydra.run.dir={folder}"])
    for line in read_lines(folder)[1:]:
        own = counted[line["round"]]
        side.step_ms.append(1e3 * line["seconds"]["train"] / steps)
        side.copies_kb.append(sum(own.values()) / 1e3 / steps)
        side.copies.append(len(own))
        sent = sum(each["sent_bytes"] for each in line["devices"]["0"])
        side.hops_kb.append(sent / 1e3 / steps)
        side.segments.add(len(line["plan"]["clusters"][0]["segments"]))


@contextmanager
def _counting() -> Iterator[defaultdict[int, defaultdict[int, int]]]:
    """Count bytes of copies that this process's control unit receives, by round and step."""
    found = defaultdict[int, defaultdict[int, int]](lambda: defaultdict(int))
    put = Replica.put

    def counting(replica: Replica, sender: str, frame: Frame) -> None:
        put(replica, sender, frame)
        found[frame.round][frame.step] += frame.only(2)[1].nbytes

    with patch.object(Replica, "put", counting):
        yield found


def _cells(side: _Side) -> list[str]:
    least, most = min(side.step_ms), max(side.step_ms)
    return [
        f"{statistics.median(side.step_ms):.0f} ({least:.0f}–{most:.0f})",
        f"{statistics.mean(side.copies_kb):.0f}",
        f"{statistics.median(side.copies):g}",
        f"{statistics.mean(side.hops_kb):.0f}",
        ", ".join(map(str, sorted(side.segments))),
    ]
