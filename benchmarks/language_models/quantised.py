"""Loss after an epoch with the frozen weights in float32, int8 and nf4, paired by seed."""

import json
from argparse import ArgumentParser, Namespace

import numpy as np
from scipy import stats

from benchmarks.devices.sides import about, save
from benchmarks.language_models.peft_loop import examples_of
from benchmarks.language_models.runs import add_model, on_conversations, run
from collapipe.config import load_overrides
from collapipe.runs.rows import build_tokenizer

_WHOLE, _BATCH = "float32", 8


def add_arguments(parser: ArgumentParser) -> None:
    """The model, and how it is kept."""
    add_model(parser)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", nargs="*", default=["int8", "nf4"], help="besides float32")


def main(arguments: Namespace) -> None:
    shared = on_conversations(arguments, arguments.rows, tokens=64, batch=_BATCH)
    settings = load_overrides(shared)
    samples = len(examples_of(settings, build_tokenizer(settings)).lengths)
    shared += ["federation.rounds=1", f"federation.local_steps={samples // _BATCH}"]
    losses: dict[str, list[float]] = {side: [] for side in (_WHOLE, *arguments.kept)}
    for seed in range(arguments.seeds):
        for side, found in losses.items():
            own = [] if side == _WHOLE else [f"model.quantization={side}"]
            folder = arguments.output / f"{side}-{seed}"
            run(folder, [*shared, *own, f"seed={seed}"])
            found.append(json.loads((folder / "summary.json").read_text())["test_loss"])
            print(f"{side} seed {seed}: test loss {found[-1]:.4f}", flush=True)
    for side, found in losses.items():
        apart = np.array(found) - np.array(losses[_WHOLE])
        half = stats.sem(apart) * stats.t.ppf(0.975, len(apart) - 1)
        low, high = apart.mean() - half, apart.mean() + half
        print(f"{side:<8} {np.mean(found):.4f}  {apart.mean():+.4f} ({low:+.4f} … {high:+.4f})")
    result = {"about": about(arguments), "options": shared, "test_loss": losses}
    save(arguments.output, "quantised", result)
