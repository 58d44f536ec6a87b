"""Memory of each process that trains 0.5 billion weights with LoRA, and the bytes of a round.

A server, a control unit with the head, and three devices, on loopback with mutual TLS.
"""

import os
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from benchmarks.language_models.inputs import HALF_BILLION, HUB_ID, numbers, random_model
from benchmarks.language_models.resident import sampled
from benchmarks.language_models.runs import COLLAPIPE, commands, lines, lora, put_up_devices
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.server_folder import ServerFolder, create
from collapipe.flower.commands import free_port

_UNIT, _SAMPLES, _TOKENS, _STEPS = "desk", 4, 64, 2
_SHARE = "4GB"  # of each device


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices and rounds."""
    parser.add_argument("--devices", type=at_least(1), default=3)
    parser.add_argument("--rounds", type=at_least(1), default=3)


def main(arguments: Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        random_model(root / "hub", HALF_BILLION)
        os.environ.update({"HF_HUB_CACHE": str(root / "hub"), "HF_HUB_OFFLINE": "1"})
        run_dir = root / "run"
        options = [
            *lora(HUB_ID, "causal_lm"),
            f"task.max_length={_TOKENS}",
            f"batch_size={_SAMPLES}",
            f"federation.rounds={arguments.rounds}",
            f"federation.local_steps={_STEPS}",
            "evaluation.where=units",
            *arguments.overrides,
        ]
        with put_up(root, arguments.devices) as (folder, pids), sampled(pids) as peaks:
            deployed = ["runtime=deployment", f"runtime.federation={folder.root}"]
            command = [*COLLAPIPE, "run", *options, *deployed, f"hydra.run.dir={run_dir}"]
            with (arguments.output / "memory.log").open("w") as log:
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        found = [moved(line) for line in lines(run_dir)]
    print(f"{'peak, MB':<24}{'whole':>12}{'anonymous':>12}{'file-backed':>12}")
    for name, peak in peaks.found.items():
        sizes = peak.whole, peak.anonymous, peak.file_backed
        print(f"{name:<24}" + "".join(f"{each / 1e6:>12,.0f}" for each in sizes))
    print(f"{'round':<6}{'s':>8}{'pipeline':>10}{'MB down':>10}{'MB up':>10}")
    for number, row in enumerate(found, 1):
        sizes = f"{row['bytes_down'] / 1e6:>10,.1f}{row['bytes_up'] / 1e6:>10,.1f}"
        print(f"{number:<6}{row['seconds']:>8.1f}{row['pipeline_share']:>10.2f}{sizes}")
    result = {"about": about(arguments), "options": options, "peaks": peaks.as_dict()}
    save(arguments.output, "memory", {**result, "rounds": found})


def moved(line: dict) -> dict[str, float]:
    """A round's seconds, its pipeline's share of them, and its bytes."""
    seconds = line["seconds"]["round"]
    return {
        "seconds": seconds,
        "pipeline_share": sum(line["pipeline_s"].values()) / seconds,
        "bytes_down": line["bytes_down"],
        "bytes_up": line["bytes_up"],
        "phases": line["seconds"],
    }


@contextmanager
def put_up(root: Path, devices: int) -> Iterator[tuple[ServerFolder, dict[str, int]]]:
    """Run a server, a unit and its devices in separate processes; yield the folder and process
    ids."""
    with commands(root) as start:
        boxes, pids = put_up_devices(start, root, devices, _SHARE)
        folder = federation(root, boxes)
        pids["server"] = start("server", " admitted", "deploy", "serve", folder.root)
        own = folder.root / "units" / _UNIT / "unit.yaml"
        pids["control unit"] = start("unit", "dials", "unit", own)
        yield folder, pids


def federation(root: Path, boxes: Path) -> ServerFolder:
    """Create a server's folder with one unit, which has credentials, devices and rows."""
    folder = create(root / "federation", [_UNIT], "127.0.0.1", free_port(), free_port())
    own = folder.root / "units" / _UNIT
    AuthorityFolder(folder.authority).add(_UNIT, Role.UNIT, 30, own / "credentials")
    rows = numbers(root / "train.jsonl", rows=200, tokens=_TOKENS)
    few = numbers(root / "few.jsonl", rows=1, tokens=_TOKENS)
    files = f"{rows}\n  validation_file: {few}\n  test_file: {few}"
    text = (own / "unit.yaml").read_text().replace("train.csv", files, 1)
    (own / "unit.yaml").write_text(f"{text}cluster: {{file: {boxes}}}\n")
    return folder
