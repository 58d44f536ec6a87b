"""1.5 billion weights in nf4 train on devices with less than half of the memory that one device
would need. Cgroups enforce the limit. Peaks are compared with the plan, and bits with an inline
run."""

import tempfile
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.arguments import at_least
from benchmarks.devices.memory import peak_bytes, reset_peak
from benchmarks.devices.sides import about, save
from benchmarks.language_models.inputs import ONE_AND_A_HALF_BILLION, numbers, random_model
from benchmarks.language_models.runs import commands, lora, put_up_devices, run
from collapipe.config import load_overrides
from collapipe.models.cost import measure_cost
from tests.network import memory_limit

_MB = 1e6
_LIBRARIES = 0.5e9  # bytes of a device that its segment cannot use
_SMALL = {**ONE_AND_A_HALF_BILLION, "hidden_size": 192, "intermediate_size": 256}


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, their limit, and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=4)
    parser.add_argument("--limit", type=float, default=1.5e9, help="of each device, in bytes")
    parser.add_argument("--tokens", type=at_least(1), default=256)
    parser.add_argument("--micro-batches", type=at_least(1), default=2, help="of one sample each")


def main(arguments: Namespace) -> None:
    count, m, limit = arguments.devices, arguments.micro_batches, int(arguments.limit)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = numbers(root / "train.jsonl", rows=20, tokens=arguments.tokens)
        few = numbers(root / "few.jsonl", rows=1, tokens=1)
        options = [
            "model.quantization=nf4",
            f"task.max_length={arguments.tokens}",
            f"batch_size={m}",
            f"pipeline.num_micro_batches={m}",
            f"data.train_file={rows}",
            *(f"data.{each}_file={few}" for each in ("validation", "test")),
            "strategy=even",
            "federation.rounds=2",
            "federation.local_steps=1",
            *arguments.overrides,
        ]
        start = stack.enter_context(commands(root))
        boxes, pids = put_up_devices(start, root, count, f"{(limit - _LIBRARIES) / _MB}MB")
        for pid in pids.values():
            stack.enter_context(memory_limit(limit)).write_text(str(pid))
        devices = ["cluster=devices", f"cluster.file={boxes}"]
        small = lora(str(random_model(root / "small", _SMALL)), "causal_lm")
        large = lora(str(random_model(root / "large", ONE_AND_A_HALF_BILLION)), "causal_lm")
        # warm-up: libraries load all they load on first use
        run(root / "run-small", [*options, *small, *devices])
        before = {name: reset_peak(pid) for name, pid in pids.items()}
        rounds = run(root / "run-devices", [*options, *large, *devices])
        peaks = {name: peak_bytes(pid) - before[name] for name, pid in pids.items()}
        alone = run(root / "run-inline", [*options, *large])
        settings = load_overrides([*options, *large])
        cost = measure_cost(settings.model, arguments.tokens, m, settings.optimizer)
        rows = [
            {
                "device": each["name"],
                "blocks": each["blocks"],
                "planned": cost.segment_needs(each["blocks"], m),
                "measured": peaks[each["name"]],
                "before": before[each["name"]],
            }
            for each in rounds[0]["devices"]["0"]
        ]
        one = min(before.values()) + cost.segment_needs(sum(each["blocks"] for each in rows), m)
        same = torch.equal(*(_weights(root / f"run-{each}") for each in ("devices", "inline")))
    print(f"limit {limit / _MB:,.0f} MB; one device alone would need {one / _MB:,.0f} MB")
    print("device         blocks   planned  measured    before, MB     ratio")
    for row in rows:
        sizes = [row[each] / _MB for each in ("planned", "measured", "before")]
        listed = "".join(f"{n:>10,.0f}" for n in sizes)
        print(f"{row['device']:<14}{row['blocks']:>7}{listed}{sizes[1] / sizes[0]:>14.2f}")
    print(f"losses {[each['train_loss'] for each in rounds]}; weights equal inline: {same}")
    result = {"about": about(arguments), "options": [*options, *large], "rows": rows, "one": one}
    save(arguments.output, "limited", {**result, "equal": same, "inline": alone, "rounds": rounds})


def _weights(folder: Path) -> Tensor:
    trained = load_file(folder / "model/model.safetensors")
    return torch.cat([trained[name].flatten() for name in sorted(trained)])
