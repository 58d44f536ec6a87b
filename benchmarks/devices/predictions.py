"""Whole runs on daemons of this machine: planned against measured seconds of each round's
pipelines."""

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from benchmarks.devices.sides import about, save
from collapipe.step_law import interval

SETTINGS = {  # devices, and the options of the run
    "three devices, width 64": (3, ()),
    "two devices, width 64": (2, ()),
    "four devices, width 64": (4, ()),
    "head on the control unit": (3, ("decoder.mode=control_unit",)),
    "LoRA": (3, ("adapter=lora",)),
    "width 256": (3, ("model.dim=256", "model.feed_forward_dim=1024", "federation.local_steps=10")),
    "width 768": (
        3,
        (
            "model.dim=768",
            "model.feed_forward_dim=3072",
            "federation.local_steps=4",
            "batch_size=16",
        ),
    ),
}
FIRST = 3  # round from which plans have settled


def add_arguments(parser: ArgumentParser) -> None:
    """Rounds and settings."""
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])


def main(arguments: Namespace) -> None:
    print(f"{'':<26}{'measured':>10}{'planned/measured: round 1':>27}{'from 3':>8}{'range':>14}")
    rows = {name: _run(arguments.rounds, *SETTINGS[name]) for name in arguments.settings}
    for name, rounds in rows.items():
        ratios = [each["planned_s"] / each["measured_s"] for each in rounds]
        later = ratios[FIRST - 1 :]
        print(
            f"{name:<26}{statistics.median(each['measured_s'] for each in rounds):>8.2f} s"
            f"{ratios[0]:>27.2f}{statistics.median(later):>8.2f}"
            f"{min(later):>8.2f} … {max(later):.2f}"
            f"  {sum(map(_held, rounds[FIRST - 1 :]))} of {len(later)} in their intervals"
        )
    save(arguments.output, "predictions", {"about": about(arguments), "rows": rows})


def _run(num_rounds: int, devices: int, options: tuple[str, ...]) -> list[dict[str, float]]:
    """Return planned and measured seconds, and the spread, of each round."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        own = f"federation.rounds={num_rounds}", f"hydra.run.dir={run}", "federation.num_units=1"
        words = "up", "--devices", str(devices), "--", "run", *own, *options
        command = [sys.executable, "-m", "collapipe", *words, "task.test_rows=4"]
        subprocess.run(command, check=True, capture_output=True)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [
            {
                "planned_s": each["cost"]["clusters"][0]["pipeline_s"],
                "measured_s": each["pipeline_s"]["0"],
                "spread": each["cost"]["clusters"][0]["spread"],
            }
            for each in lines
        ]


def _held(line: dict[str, float]) -> bool:
    low, high = interval(line["planned_s"], line["spread"])
    return low <= line["measured_s"] <= high
