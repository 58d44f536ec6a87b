"""Seconds of ``collapipe device measure`` on daemons of this machine: for the inventory's model,
and with a run's options, where a trial run measures the steps."""

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from benchmarks.arguments import at_least
from benchmarks.devices.predictions import Setting, daemons_of, measuring_s
from benchmarks.devices.sides import save
from benchmarks.machine import record

COLUMNS = ["measured", "median, s", "most, s"]
_RUN = ("federation.num_units=1", "pipeline.threads=1")
SIDES = {
    "inventory's model": (),
    "options of README's example": _RUN,
    "256 wide": (*_RUN, "model.dim=256", "model.feed_forward_dim=1024"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices and load."""
    parser.add_argument("--devices", type=at_least(1), default=3)
    parser.add_argument("--load", default="unknown", help="Other work of this machine.")


def main(arguments: Namespace) -> None:
    setting = Setting(devices=arguments.devices)
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder, daemons_of(setting, Path(folder)) as inventory:
        for _ in range(arguments.turns):
            for side, options in SIDES.items():
                taken[side].append(measuring_s(inventory, options))
    rows = [[side, f"{statistics.median(s):.0f}", f"{max(s):.0f}"] for side, s in taken.items()]
    print("\n".join(" | ".join(row) for row in (COLUMNS, *rows)))
    found = {**record(arguments.load, [0], COLUMNS, rows), "aim": "< 120 s"}
    save(arguments.output, "measuring", found)
