"""Tokens per second and memory where a GPU computes: in one process, and with two devices of which
one computes on the GPU. The first loss on the CPU stands beside the GPU's."""

import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from benchmarks.devices.sides import about, save
from benchmarks.language_models.inputs import (
    HALF_BILLION,
    ONE_AND_A_HALF_BILLION,
    numbers,
    random_model,
)
from benchmarks.language_models.resident import every
from benchmarks.language_models.runs import commands, lora, run
from collapipe.flower.commands import free_port

_SIZES = {"0.5B": HALF_BILLION, "1.5B": ONE_AND_A_HALF_BILLION}
_KEPT = {"bfloat16": list[str](), "nf4": ["model.quantization=nf4"]}
_GPU = ["runtime.torch_device=cuda", "server.torch_device=cuda"]
_ONCE = ["federation.rounds=1", "federation.local_steps=1"]
_SHARE = 16e9  # bytes of each device
_ASSUMED = {"cuda": 1e13, "cpu": 2e11}  # FLOP/s, until rounds are measured


def add_arguments(parser: ArgumentParser) -> None:
    """Sizes, and a batch."""
    parser.add_argument("--sizes", nargs="*", default=[*_SIZES], choices=_SIZES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each of three rounds")


def main(arguments: Namespace) -> None:
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for size in arguments.sizes:
            model = random_model(root / size, _SIZES[size])
            options = _options(arguments, root, model)
            for row, own in _rows(arguments, root / size, options):
                found[f"{size} {row}"] = own
                print(f"{size} {row}: {own}", flush=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(f"{'model, kept, devices':<30}{'tokens/s':>10}{'GPU, MB':>10}{'round, s':>10}")
    for name, each in found.items():
        if "tokens_per_s" in each:
            listed = (
                f"{each['tokens_per_s']:>10,.0f}{each['gpu_mb']:>10,.0f}{each['seconds']:>10.1f}"
            )
            print(f"{name:<30}{listed}")
    save(arguments.output, "gpu", {"about": about(arguments), "card": card, "rows": found})


def _rows(
    arguments: Namespace, root: Path, options: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    steps = ["federation.rounds=3", f"federation.local_steps={arguments.steps}"]
    for kept, own in _KEPT.items():
        yield f"{kept}, one process", _speed(root / f"{kept}-one", [*options, *own, *_GPU, *steps])
        with _two_devices(root / kept) as devices:
            one = [*options, *own, *_GPU, *devices]
            yield f"{kept}, two devices", _speed(root / f"{kept}-two", [*one, *steps])
    losses = [
        run(root / name, [*options, *_ONCE, *where])[0]["train_loss"]
        for name, where in {"loss-cpu": list[str](), "loss-gpu": _GPU}.items()
    ]
    yield "first loss", {"cpu": losses[0], "gpu": losses[1]}


def _options(arguments: Namespace, root: Path, model: Path) -> list[str]:
    rows = numbers(root / "train.jsonl", rows=500, tokens=arguments.tokens)
    few = numbers(root / "few.jsonl", rows=1, tokens=1)
    return [
        *lora(str(model), "causal_lm"),
        f"task.max_length={arguments.tokens}",
        f"batch_size={arguments.batch}",
        f"pipeline.num_micro_batches={arguments.micro_batches}",
        f"data.train_file={rows}",
        *(f"data.{each}_file={few}" for each in ("validation", "test")),
        *arguments.overrides,
    ]


def _speed(folder: Path, options: Sequence[str]) -> dict[str, float]:
    """A run's speed from the second round on, and the most memory that the GPU had in use."""
    used = [0]
    with every(0.5, lambda: used.append(_used_mb())):
        rounds = run(folder, options)[1:]
    seconds = sum(each["seconds"]["round"] for each in rounds)
    return {
        "tokens_per_s": sum(each["target_tokens"] for each in rounds) / seconds,
        "gpu_mb": max(used),
        "seconds": seconds / len(rounds),
        "pipeline_share": sum(sum(each["pipeline_s"].values()) for each in rounds) / seconds,
    }


def _used_mb() -> int:
    """What all processes have in use on the GPU, with their contexts."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(
        subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[0]
    )


@contextmanager
def _two_devices(root: Path) -> Iterator[list[str]]:
    """Options for a run with a device on the GPU and one on the CPU."""
    root.mkdir()
    devices = []
    with commands(root) as start:
        for where in ("cuda", "cpu"):
            address = f"127.0.0.1:{free_port()}"
            own = ["--name", where, "--listen", address, "--torch-device", where]
            own += ["--memory", str(_SHARE), "--threads", "8", "--insecure"]
            start(where, address, "device", *own)
            law = {"flops_per_s": _ASSUMED[where], "d2d_rate_bps": 1e10, "memory_bytes": _SHARE}
            devices.append({"name": where, "address": address, **law})
        boxes = root / "boxes.yaml"
        model = {"name": "dates_transformer"}  # of a run without options
        clusters = [{"name": "boxes", "devices": devices}]
        boxes.write_text(yaml.safe_dump({"batch_size": 1, "model": model, "clusters": clusters}))
        yield ["cluster=devices", f"cluster.file={boxes}"]
