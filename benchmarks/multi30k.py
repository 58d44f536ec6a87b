"""BLEU on Multi30K: three clusters against an ordinary loop on the same batches.

    python benchmarks/multi30k.py --data ../shared/data/multi30k --output outputs/multi30k

Both sides start from the same weights and see the same samples; the loop takes the union of the
units' batches in each step, at a learning rate of its own. Prints a table, writes
``multi30k.json`` and ``multi30k.png``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from machine import machine
from ordinary import Ordinary, use_threads

from collapipe.config import load_overrides
from collapipe.tasks.rows import load_splits
from server_app.evaluation import Evaluator


def main() -> None:
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    overrides = [
        "experiment=multi30k",
        f"data.root='{arguments.data.resolve()}'",
        f"seed={arguments.seed}",
        *arguments.overrides,
    ]
    run_dir = (arguments.output / f"collapipe-{arguments.seed}").resolve()
    command = [sys.executable, "-m", "collapipe.cli.app", "run", *overrides]
    federated = subprocess.Popen([*command, f"hydra.run.dir='{run_dir}'"])
    try:
        if not arguments.together:
            federated.wait()
        rate = f"optimizer.lr={arguments.loop_lr}"
        loop = ordinary(
            [*overrides, rate], threads=1 if arguments.together else os.cpu_count() or 1
        )
        status = federated.wait()
    finally:
        federated.terminate()
    if status:
        raise SystemExit(status)
    result = {"ordinary": loop, "collapipe": from_run(run_dir), "machine": machine()}
    result["loop_lr"] = arguments.loop_lr
    result["overrides"] = overrides
    (arguments.output / "multi30k.json").write_text(json.dumps(result, indent=2) + "\n")
    table(result)
    draw(result, arguments.output / "multi30k.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data")) / "multi30k"
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--output", type=Path, default=Path("outputs/multi30k"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop-lr", type=float, default=1e-3, help="learning rate of the loop")
    parser.add_argument("--together", action="store_true", help="both sides at once, a core each")
    parser.add_argument("overrides", nargs="*", help="options of the run, of both sides")
    return parser.parse_args()


def ordinary(overrides: list[str], threads: int) -> dict[str, object]:
    """The loop's curve: samples, validation BLEU; and its test BLEU."""
    use_threads(threads)
    settings = load_overrides(overrides)
    loop = Ordinary.prepare(settings)
    splits = load_splits(settings)
    validation = Evaluator(settings.task, splits.validation, loop.tokenizer)
    federation, curve = settings.federation, []
    start, every = time.perf_counter(), federation.eval_every * federation.local_steps

    def each_step(step: int, loss: float) -> None:
        if (step + 1) % every == 0 or step + 1 == federation.total_steps:
            score = validation.evaluate(loop.model).score.value
            samples = (step + 1) * settings.batch_size * federation.num_units
            curve.append((samples, score))
            print(
                f"ordinary loop: {samples} samples, loss {loss:.3f}, BLEU {score:.2f}", flush=True
            )

    loop.train(unions=True, each_step=each_step)
    test = Evaluator(settings.task, splits.test, loop.tokenizer).evaluate(loop.model)
    return {
        "curve": curve,
        "test": test.score.value,
        "signature": test.score.signature,
        "wall_s": time.perf_counter() - start,
        "threads": threads,
    }


def from_run(run_dir: Path) -> dict[str, object]:
    """The same of a run's folder."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    curve, samples = [], 0
    for line in lines:
        samples += line["samples"]
        if "metric" in line:
            curve.append((samples, line["metric"]["value"]))
    return {
        "curve": curve,
        "test": summary["metric"]["value"],
        "signature": summary["metric"]["signature"],
        "wall_s": summary["wall_s"],
    }


def table(result: dict) -> None:
    print(f"{'samples':>10} {'ordinary':>10} {'collapipe':>10}   validation BLEU")
    pairs = zip(result["ordinary"]["curve"], result["collapipe"]["curve"], strict=True)
    for (samples, loop), (_, federated) in pairs:
        print(f"{samples:>10,} {loop:>10.2f} {federated:>10.2f}")
    loop, federated = result["ordinary"]["test"], result["collapipe"]["test"]
    print(f"{'test':>10} {loop:>10.2f} {federated:>10.2f}   difference {federated - loop:+.2f}")
    seconds = [result[side]["wall_s"] for side in ("ordinary", "collapipe")]
    print(f"{'seconds':>10} {seconds[0]:>10.0f} {seconds[1]:>10.0f}")


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, style in (("ordinary", "k--o"), ("collapipe", "C0-s")):
        samples, scores = zip(*result[name]["curve"], strict=True)
        axes.plot(samples, scores, style, label=f"{name}: test {result[name]['test']:.1f}")
    axes.set(
        xlabel="training samples", ylabel="validation BLEU (sacrebleu)", title="Multi30K de–en"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
