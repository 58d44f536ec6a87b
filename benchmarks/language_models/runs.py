"""Runs of ``collapipe run`` in separate processes, and their options."""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.arguments import at_least
from benchmarks.finished import finished, remember
from benchmarks.language_models.inputs import conversations
from collapipe.process.children import ending

COLLAPIPE = (sys.executable, "-m", "collapipe")
_EVALUATED = 16  # rows


def add_model(parser: ArgumentParser) -> None:
    """Add arguments for the model, its task and threads."""
    parser.add_argument("--model", type=Path, required=True, help="folder, such as SmolLM2's")
    parser.add_argument("--task", default="causal_lm", help="or chat")
    parser.add_argument("--threads", type=at_least(1), default=1)


def lora(model: str, task: str) -> list[str]:
    """Options of a run of one unit that trains adapters, with the head on the unit. ``model`` is a
    folder or hub id."""
    return [
        f"task={task}",
        "model=huggingface",
        f"model.name={model}",
        "model.pretrained=true",
        "adapter=lora",
        "optimizer.lr=1.0e-3",
        "decoder.mode=control_unit",
        "federation.num_units=1",
        "federation.eval_every=99999",
        "federation.checkpoint_every=0",
    ]


def on_conversations(arguments: Namespace, rows: int, tokens: int, batch: int) -> list[str]:
    """``lora`` with ``rows`` made-up rows, and a few rows for evaluation."""
    file = conversations(arguments.output / "train.jsonl", rows, arguments.task)
    few = conversations(arguments.output / "few.jsonl", _EVALUATED, arguments.task, seed=1)
    return [
        *lora(str(arguments.model.resolve()), arguments.task),
        f"task.max_length={tokens}",
        f"batch_size={batch}",
        f"pipeline.threads={arguments.threads}",
        f"data.train_file={file}",
        *(f"data.{each}_file={few}" for each in ("validation", "test")),
        *arguments.overrides,
    ]


def run(folder: Path, options: Sequence[str]) -> list[dict]:
    """Run once, unless finished; return the lines of ``metrics.jsonl``."""
    if not finished(folder, options):
        with folder.with_suffix(".log").open("w") as log:
            command = [*COLLAPIPE, "run", *options, f"hydra.run.dir={folder}"]
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        remember(folder, options)
    return lines(folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def commands(root: Path) -> Iterator[Callable[..., int]]:
    """Yield ``start(name, word, *command)``: it starts ``collapipe COMMAND…``, waits until its log
    ``root/NAME.log`` has the word, and returns its process id."""
    processes = list[subprocess.Popen]()

    def start(name: str, ready: str, *command: object) -> int:
        file = root / f"{name}.log"
        with file.open("w") as words:
            started = [*COLLAPIPE, *map(str, command)]
            process = subprocess.Popen(started, stdout=words, stderr=subprocess.STDOUT)
        processes.append(process)
        while ready not in file.read_text():
            assert process.poll() is None, file.read_text()
            time.sleep(0.2)
        return process.pid

    with ending(processes, 20.0):
        yield start


def put_up_devices(
    start: Callable[..., int], root: Path, count: int, memory: str
) -> tuple[Path, dict[str, int]]:
    """Start devices that offer ``memory`` each; return their inventory and process ids."""
    boxes = root / "boxes.yaml"
    start("up", "inventory", "up", "--devices", count, "--memory", memory, "--inventory", boxes)
    (cluster,) = yaml.safe_load(boxes.read_text())["clusters"]
    return boxes, {each["name"]: int(each["process_id"]) for each in cluster["devices"]}
