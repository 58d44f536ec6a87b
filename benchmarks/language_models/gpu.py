"""Tokens per second and memory with a GPU: in one process, with one of two devices on the GPU,
and in a plain peft loop."""

import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
import yaml

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from benchmarks.language_models.inputs import (
    HALF_BILLION,
    ONE_AND_A_HALF_BILLION,
    numbers,
    random_model,
)
from benchmarks.language_models.peft_loop import peft_loop
from benchmarks.language_models.resident import every
from benchmarks.language_models.runs import commands, lora, run
from collapipe.flower.commands import free_port

Round = tuple[float, float, float]  # mean loss, tokens, seconds
_SIZES = {"0.5B": HALF_BILLION, "1.5B": ONE_AND_A_HALF_BILLION}
_KEPT = {"bfloat16": list[str](), "nf4": ["model.quantization=nf4"]}
_GPU = ["runtime.torch_device=cuda", "server.torch_device=cuda"]
_ROUNDS = 3  # the first round does not count
_THREADS = 8  # torch's threads in each process
_SHARE = 16e9  # bytes of each device
_ASSUMED = {"cuda": 1e13, "cpu": 2e11}  # FLOP/s, until rounds are measured


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for sizes and a batch."""
    parser.add_argument("--sizes", nargs="*", default=[*_SIZES], choices=_SIZES)
    parser.add_argument("--kept", nargs="*", default=[*_KEPT], choices=_KEPT)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--tokens", type=at_least(1), default=256)
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    parser.add_argument("--steps", type=at_least(1), default=4, help="of each of three rounds")


def main(arguments: Namespace) -> None:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result: dict = {"about": about(arguments), "card": card, "rows": (found := {})}
    print(f"{'model, kept, where':<32}{'tokens/s':>10}{'GPU, MB':>10}  losses", flush=True)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for size in arguments.sizes:
            options = _options(arguments, root, random_model(root / size, _SIZES[size]))
            for row, own in _rows(root / size, options, arguments.kept):
                found[f"{size}, {row}"] = own
                listed = f"{own['tokens_per_s']:>10,.0f}{own['gpu_mb']:>10,.0f}  {own['losses']}"
                print(f"{f'{size}, {row}':<32}{listed}", flush=True)
                save(arguments.output, "gpu", result)


def _rows(root: Path, options: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, dict]]:
    for kept in kinds:
        own = [*options, *_KEPT[kept], *_GPU]
        yield f"{kept}, one process", _measured(_run, root / f"{kept}-one", own)
        whole = [*own, "pipeline.num_micro_batches=1"]
        yield f"{kept}, one process, m = 1", _measured(_run, root / f"{kept}-whole", whole)
        with _two_devices(root / kept) as devices:
            own += devices
            yield f"{kept}, two devices", _measured(_run, root / f"{kept}-two", own)
    yield "float32, peft", _measured(_plain_loop, root / "peft.json", [*options, *_GPU])


def _run(folder: Path, options: Sequence[str]) -> list[Round]:
    return [
        (each["train_loss"], each["target_tokens"], each["seconds"]["round"])
        for each in run(folder, options)
    ]


def _plain_loop(file: Path, options: Sequence[str]) -> list[Round]:
    """The steps of a peft loop, grouped like the rounds."""
    steps = peft_loop(file, _THREADS, options)
    size = len(steps) // _ROUNDS
    rounds = [steps[at : at + size] for at in range(0, len(steps), size)]
    return [
        (
            fmean(step["loss"] for step in each),
            sum(step["tokens"] for step in each),
            sum(step["seconds"] for step in each),
        )
        for each in rounds
    ]


def _measured(
    work: Callable[[Path, Sequence[str]], list[Round]], place: Path, options: Sequence[str]
) -> dict:
    """Speed from the second round on, each round's loss, and the peak memory in use on the GPU."""
    used = [0]
    with every(0.5, lambda: used.append(_used_mb())):
        rounds = work(place, options)
    _, tokens, seconds = map(sum, zip(*rounds[1:], strict=True))
    losses = [round(loss, 4) for loss, _, _ in rounds]
    return {"tokens_per_s": tokens / seconds, "gpu_mb": max(used), "losses": losses}


def _options(arguments: Namespace, root: Path, model: Path) -> list[str]:
    rows = numbers(root / "train.jsonl", rows=500, tokens=arguments.tokens)
    few = numbers(root / "few.jsonl", rows=1, tokens=1)
    return [
        *lora(str(model), "causal_lm"),
        f"task.max_length={arguments.tokens}",
        f"batch_size={arguments.batch}",
        f"pipeline.num_micro_batches={arguments.micro_batches}",
        f"pipeline.threads={_THREADS}",
        f"federation.rounds={_ROUNDS}",
        f"federation.local_steps={arguments.steps}",
        f"data.train_file={rows}",
        *(f"data.{each}_file={few}" for each in ("validation", "test")),
        *arguments.overrides,
    ]


def _used_mb() -> int:
    """The memory of all processes on the GPU, with their contexts."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(
        subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[0]
    )


@contextmanager
def _two_devices(root: Path) -> Iterator[list[str]]:
    """Start a device on the GPU and one on the CPU; yield the options of a run on them."""
    root.mkdir()
    devices = []
    with commands(root) as start:
        for where in ("cuda", "cpu"):
            address = f"127.0.0.1:{free_port()}"
            own = ["--name", where, "--listen", address, "--torch-device", where]
            own += ["--memory", str(_SHARE), "--threads", str(_THREADS), "--insecure"]
            start(where, address, "device", *own)
            law = {"flops_per_s": _ASSUMED[where], "d2d_rate_bps": 1e10, "memory_bytes": _SHARE}
            devices.append({"name": where, "address": address, **law})
        boxes = root / "boxes.yaml"
        model = {"name": "dates_transformer"}  # the default model of a run
        clusters = [{"name": "boxes", "devices": devices}]
        boxes.write_text(yaml.safe_dump({"batch_size": 1, "model": model, "clusters": clusters}))
        yield ["cluster=devices", f"cluster.file={boxes}"]
