"""Cost and effect of privacy: accuracy and membership inference against ε, with thirty units.

    python -m benchmarks.private mr_en --data ../shared/data --seeds 0 1 2

``mr_en`` and ``toutiao15_lora`` train adapters in MiniLM's last block, ``mr_en_full`` all of
MiniLM, ``toutiao15`` a small BERT from random weights. Units are simulated nodes that take one step
in a round. ``none`` averages updates without clipping. ``clipped`` clips them to about the norm of
most updates. The other rules add noise from the operating system's random source, such that ε has
the given value after the last round. Prints each run's accuracy on the test rows, and how well
losses distinguish training rows from other rows (``collapipe audit``'s advantage). Finally prints
mean, minimum and maximum of both over the seeds.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dp_accounting

from benchmarks.machine import machine
from benchmarks.polarity import options
from collapipe.audit.membership import membership_of
from collapipe.runs.model import load_model

UNITS, DELTA = 30, 1e-3
PRIVATE = "decoder.mode=control_unit", "federation.local_steps=1", "federation.weighting=uniform"
KINDS = {  # rounds, clip norm and values of ε
    "mr_en": (15, 0.3, (64.0, 16.0, 8.0, 2.0)),
    "mr_en_full": (8, 1.0, (64.0,)),
    "toutiao15": (52, 1.0, (64.0, 8.0)),
    "toutiao15_lora": (20, 1.5, (64.0, 8.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    arguments = parser.parse_intermixed_args()
    rounds, clip_norm, epsilons = KINDS[arguments.kind]
    data = arguments.data.resolve()
    shared = [*options_of(arguments.kind, data, rounds), *PRIVATE, *arguments.overrides]
    print(json.dumps({"machine": machine(), "clip_norm": clip_norm, "overrides": shared}))
    clipped = [f"privacy.clip_norm={clip_norm}", "federation.max_update_norm=null"]
    rules: dict[str, tuple[float | None, list[str]]] = {
        "none": (None, []),
        "clipped": (None, clipped),
    }
    for epsilon in epsilons:
        noise = dp_accounting.get_sigma_gaussian(epsilon, DELTA) * math.sqrt(rounds)
        noise_options = [f"privacy.noise_multiplier={noise}", f"privacy.delta={DELTA}"]
        rules[f"epsilon {epsilon:g}"] = epsilon, [*clipped, *noise_options]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
    for seed in arguments.seeds:
        for name, (spent, own) in rules.items():
            runs[name].append(one := measured([*shared, *own, f"seed={seed}"], spent))
            print(
                f"seed {seed}, {name:<12} accuracy {one[0]:.4f}, membership {one[1]:.3f}",
                flush=True,
            )
    for name, found in runs.items():
        accuracies, advantages = zip(*found, strict=True)
        print(f"{name:<12} accuracy {spread(accuracies)}, membership {spread(advantages)}")


def options_of(kind: str, data: Path, rounds: int) -> list[str]:
    """Options of a run with all units in every round."""
    if kind == "mr_en":
        return [*options(data, UNITS, rounds), "batch_size=66"]
    if kind == "toutiao15_lora":
        own = [f"data.root='{data / 'toutiao15'}'", "data.max_train_samples=10000"]
        return [*options(data, UNITS, rounds), "batch_size=66", *own, "optimizer.lr=1.0e-2"]
    scale = [
        f"federation.num_units={UNITS}",
        f"federation.rounds={rounds}",
        f"federation.eval_every={rounds}",
        "federation.checkpoint_every=0",
        f"channel.num_channels={UNITS}",
        "pipeline.num_micro_batches=1",
    ]
    if kind == "mr_en_full":
        adapted = ("adapter", "optimizer", "federation", "channel", "pipeline", "decoder")
        model = [each for each in options(data, UNITS, rounds) if not each.startswith(adapted)]
        return [*model, *scale, "batch_size=66", "optimizer.warmup_steps=0"]
    folders = f"data.root='{data / kind}'", f"data.tokenizer='{data / 'bert-base-chinese'}'"
    return [f"experiment={kind}", *folders, *scale]


def measured(overrides: list[str], epsilon: float | None) -> tuple[float, float]:
    """Accuracy on the test rows after the last round, and the advantage of the loss-based attack.

    Raises ``SystemExit`` if a unit missed a round, or if the run's final ε is not ``epsilon``.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own = ["runtime=simulation", f"hydra.run.dir={run_dir}"]
        command = [sys.executable, "-m", "collapipe", "run", *overrides, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        if any(len(json.loads(line)["units"]) != UNITS for line in lines):
            raise SystemExit(f"{overrides}: not all units finished every round")
        spent = summary.get("privacy", {}).get("epsilon", math.inf)
        if epsilon is not None and not math.isclose(spent, epsilon, rel_tol=0.01):
            raise SystemExit(f"{overrides}: spent ε = {spent}, expected {epsilon:g}")
        membership = membership_of(*load_model(run_dir))
    assert membership is not None  # the rows are on this machine
    return float(summary["metric"]["value"]), membership.advantage.value


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f}..{max(values):.3f})"


if __name__ == "__main__":
    main()
