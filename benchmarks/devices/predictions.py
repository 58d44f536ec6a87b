"""Whole runs on daemons of this machine: planned and measured seconds of each round's pipelines.
Daemons in networks of limited rate have quotas and count as separate machines."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import apart
from benchmarks.devices.sides import about, limited, save
from collapipe.credentials.authority import CONTROL_UNIT
from collapipe.step_law import interval
from tests.boxes import boxes
from tests.network import network


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a run, number of devices, and rate of their links (None: one machine without
    quotas). The inventory describes a core by its speed and the launch time of a block. In a
    network, daemons have quotas of ``cores``."""

    options: tuple[str, ...] = ()
    devices: int = 3
    mbit: float | None = None
    flops_per_s: float = 2e10
    launch_s: float = 0.0
    cores: tuple[float, ...] = 0.4, 0.28, 0.16, 0.08  # 10:7:4:2


WIDTH_256 = "model.dim=256", "model.feed_forward_dim=1024", "federation.local_steps=10"
WIDTH_768 = (
    *("model.dim=768", "model.feed_forward_dim=3072"),
    *("federation.local_steps=4", "batch_size=16"),
)
LORA = "adapter=lora", "federation.local_steps=10"
SETTINGS = {
    "three devices, width 64": Setting(),
    "two devices, width 64": Setting(devices=2),
    "four devices, width 64": Setting(devices=4),
    "head on the control unit": Setting(("decoder.mode=control_unit",)),
    "LoRA": Setting(("adapter=lora",)),
    "width 256": Setting(WIDTH_256),
    "width 768": Setting(WIDTH_768),
    "quotas, 50 Mbit/s": Setting(("federation.local_steps=10",), 4, 50),
    "quotas, 100 Mbit/s": Setting(("federation.local_steps=10",), 4, 100),
    "quotas, 1 Gbit/s": Setting(("federation.local_steps=10",), 4, 1000),
    "quotas, 100 Mbit/s, LoRA": Setting(LORA, 4, 100),
    "quotas, 100 Mbit/s, width 256": Setting((*WIDTH_256, "federation.local_steps=5"), 4, 100),
}
COMMAND = sys.executable, "-m", "collapipe"
SINGLE = "strategy.sharing=never"
FIRST = 3  # from this round on, plans no longer change much


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for rounds and settings."""
    parser.add_argument("--rounds", type=at_least(1), default=8)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--measured", action="store_true", help="Measure the inventory before.")


def main(arguments: Namespace) -> None:
    print(f"{'':<26}{'measured':>10}{'planned/measured: round 1':>27}{'from 3':>8}{'range':>14}")
    rounds, measured = arguments.rounds, arguments.measured
    settings = ((name, SETTINGS[name]) for name in arguments.settings)
    rows = {
        name: run_rounds(rounds, measured, replace(own, options=(*own.options, SINGLE)))
        for name, own in settings
    }
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


def run_rounds(num_rounds: int, measured: bool, setting: Setting) -> list[dict[str, Any]]:
    """Return planned and measured seconds, the spread and the plan of each round."""
    with tempfile.TemporaryDirectory() as folder, daemons_of(setting, Path(folder)) as inventory:
        options = "federation.num_units=1", "pipeline.threads=1", *setting.options
        if measured:
            print(f"{measuring_s(inventory, options):.0f} s of measuring", flush=True)
        there = "cluster=devices", f"cluster.file={inventory}"
        rounds = f"federation.rounds={num_rounds}", "task.test_rows=4"
        return [
            {
                "planned_s": each["cost"]["clusters"][0]["pipeline_s"],
                "measured_s": each["pipeline_s"]["0"],
                "spread": each["cost"]["clusters"][0]["spread"],
                "plan": _plan_text(each["plan"]["clusters"][0]),
            }
            for each in run_lines(Path(folder, "run"), *there, *options, *rounds)
        ]


def _plan_text(plan: dict[str, Any]) -> str:
    """The blocks of each stage, with the rows of its devices if they share it."""
    stages = []
    for each in plan["segments"]:
        rows = ", ".join(str(share["rows"]) for share in each["shares"])
        stages.append(f"{each['span']['blocks']}{f' ({rows})' if rows else ''}")
    return f"{' + '.join(stages) or 'replicas'}, m = {plan['num_micro_batches']}"


def daemons_of(setting: Setting, folder: Path) -> AbstractContextManager[Path]:
    """Run the daemons of a setting; yield their inventory in ``folder``."""
    there = _on_one_machine if setting.mbit is None else _in_network
    return there(setting, folder)


def measuring_s(inventory: Path, options: Sequence[str]) -> float:
    """Measure the devices for a run's options; return the seconds taken."""
    began = time.monotonic()
    _call("device", "measure", str(inventory), *options, "--write")
    return time.monotonic() - began


def run_lines(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run in a separate process, and return the line of each round."""
    _call("run", *options, f"hydra.run.dir={folder}")
    return read_lines(folder)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the line of each round of a run."""
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@contextmanager
def _on_one_machine(setting: Setting, folder: Path) -> Iterator[Path]:
    """Run daemons by ``collapipe up``; yield their inventory."""
    file = folder / "inventory.yaml"
    up = *COMMAND, "up", "--devices", str(setting.devices), "--inventory", str(file)
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as daemons:
        try:
            assert daemons.stdout is not None
            assert any("Ctrl-C ends" in line for line in daemons.stdout)
            yield file
        finally:
            daemons.terminate()


@contextmanager
def _in_network(setting: Setting, folder: Path) -> Iterator[Path]:
    """Run daemons with quotas and links of the setting's rate; yield their inventory. Its speeds
    are proportional to the quotas."""
    assert setting.mbit is not None
    with ExitStack() as stack:
        there = stack.enter_context(network(setting.devices, setting.mbit * 1e6))
        places = stack.enter_context(apart(there.places))
        started = stack.enter_context(boxes(folder, places, "4GB"))
        devices = []
        for box, cores in zip(started.daemons, setting.cores, strict=False):
            stack.enter_context(limited(box.process.pid, cores))
            known = {"flops_per_s": setting.flops_per_s * cores, "d2d_rate_bps": setting.mbit * 1e6}
            known |= {"launch_s": setting.launch_s / cores} if setting.launch_s else {}
            devices.append({"name": box.name, "address": box.address, **known})
        content = {
            "batch_size": 64,
            "model": {"name": "dates_transformer", "tokens": 32},
            "credentials": str(folder / "credentials" / CONTROL_UNIT),
            "clusters": [{"name": "cluster-0", "devices": devices}],
        }
        file = folder / "inventory.yaml"
        file.write_text(json.dumps(content, indent=2))  # JSON is YAML
        yield file


def _call(*words: str) -> None:
    done = subprocess.run([*COMMAND, *words], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def _held(line: dict[str, float]) -> bool:
    low, high = interval(line["planned_s"], line["spread"])
    return low <= line["measured_s"] <= high
