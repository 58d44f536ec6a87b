"""Accuracy by rounds if units hold different labels: Dirichlet shards of ``toutiao15``.

    python benchmarks/non_iid.py --data ../shared/data

With a smaller alpha a unit has fewer labels. Draws ``non_iid.png`` with a curve for each alpha and
writes ``non_iid.json``. Finished runs are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arguments import at_least, writable
from finished import finished, remember
from machine import machine

ALPHAS = 0.1, 1, 100
_AVERAGED = (  # AdamW on the units, ten steps a round
    "optimizer=adamw",
    "optimizer.lr=1.0e-3",
    "optimizer.warmup_steps=20",
    "optimizer.decay=linear",
    "server_optimizer=fedavg",
    "federation.local_steps=10",
    "federation.rounds=30",
    "federation.eval_every=3",
    "data.max_eval_samples=2000",
)


def main() -> None:
    arguments = parse()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = arguments.data.resolve()
    shared = [
        "experiment=toutiao15",
        "partitioner=dirichlet",
        f"data.root='{data / 'toutiao15'}'",
        f"data.tokenizer='{data / 'bert-base-chinese'}'",
        *_AVERAGED,
        *arguments.overrides,
    ]
    jobs = [(alpha, seed) for seed in range(arguments.seeds) for alpha in ALPHAS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda job: run(*job, shared, folder), jobs))
    written = {"overrides": shared, "runs": results, "machine": machine()}
    (folder / "non_iid.json").write_text(json.dumps(written, indent=2) + "\n")
    for result in results:
        end, shown = result["curve"][-1], [f"{value:.3f}" for _, value in result["curve"]]
        rows = [shard["rows"] for shard in result["shards"]]
        print(f"alpha {result['alpha']:>5g} seed {result['seed']} rows {rows}: {' '.join(shown)}")
        print(f"    after {end[0]} rounds {end[1]:.4f}, test {result['test']:.4f}")
    draw(results, folder / "non_iid.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--output", type=writable, default=Path("outputs/non_iid"))
    parser.add_argument("--seeds", type=at_least(1), default=1)
    parser.add_argument("--jobs", type=at_least(1), default=2, help="at a time")
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    return parser.parse_intermixed_args()


def run(alpha: float, seed: int, shared: Sequence[str], folder: Path) -> dict:
    """Validation accuracy by round, test accuracy, and each unit's shard."""
    run_dir = folder / f"alpha-{alpha}-{seed}"
    options = [*shared, f"data.partitioner.alpha={alpha}", f"seed={seed}"]
    if not finished(run_dir, options):
        own = f"hydra.run.dir='{run_dir}'"
        command = [sys.executable, "-m", "collapipe", "run", *options, own]
        with run_dir.with_name(f"{run_dir.name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        remember(run_dir, options)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "alpha": alpha,
        "seed": seed,
        "curve": [(line["round"], line["metric"]["value"]) for line in lines if "metric" in line],
        "test": json.loads((run_dir / "summary.json").read_text())["metric"]["value"],
        "shards": json.loads((run_dir / "shards.json").read_text())["shards"],
    }


def draw(results: Sequence[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for result in results:
        rounds, values = zip(*result["curve"], strict=True)
        number = ALPHAS.index(result["alpha"])
        label = f"α = {result['alpha']:g}" if result["seed"] == 0 else None
        axes.plot(rounds, values, "os^"[number] + "-", color=f"C{number}", label=label)
    axes.set(xlabel="round", ylabel="validation accuracy", title="toutiao15, Dirichlet shards")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
