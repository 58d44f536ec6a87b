"""Seconds of a round with almost no computation: CollaPipe against stock Flower FedAvg.

    python benchmarks/overhead.py --output outputs/overhead

Both sides run under ``flwr run`` with the same nodes and payload, and take turns. A CollaPipe round
opens its links, streams one micro-batch of one row and saves the model; a stock round returns the
arrays. Prints the medians and their ratio with a 95 % interval over the turns, and writes
``overhead.json``.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from arguments import at_least, writable
from machine import machine
from scipy import stats

from collapipe.cli.run import run_job
from collapipe.cli.simulation import run_simulation

HERE = Path(__file__).parent
EMPTY = [
    "model._target_=empty_model.EmptySpec",
    "~model.num_decoder_blocks",
    "~model.num_heads",
    "~model.feed_forward_dim",
    "~model.dropout",
    "~model.norm",
    "~model.tie_embeddings",
    "model.num_blocks=1",
    "model.dim=1",
    "strategy=even",
    "cluster=even",
    "cluster.num_devices=1",
    "batch_size=1",
    "pipeline.num_micro_batches=1",
    "optimizer=sgd",
    "optimizer.lr=1e-12",
    "federation.local_steps=1",
    "federation.eval_every=99999",
    "task.train_rows=30",
    "task.validation_rows=1",
    "task.test_rows=1",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/overhead"))
    parser.add_argument("--turns", type=at_least(2), default=5)
    parser.add_argument("--rounds", type=at_least(2), default=30)
    parser.add_argument("--units", type=at_least(1), default=3)
    parser.add_argument("--payload-bytes", type=int, default=4_000_000)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(HERE)  # so that simulated units find the empty model
    sides = {"collapipe": collapipe_rounds, "stock": stock_rounds}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.turns):
        for name, measure in sides.items():
            seconds[name].append(statistics.median(measure(arguments)))
            print(f"turn {turn}: {name} {seconds[name][-1]:.3f} s a round", flush=True)
    ratios = np.array(seconds["collapipe"]) / np.array(seconds["stock"])
    half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / len(ratios) ** 0.5
    print(
        f"ratio {ratios.mean():.3f}, 95 % interval {ratios.mean() - half:.3f}–"
        f"{ratios.mean() + half:.3f} over {len(ratios)} turns of {arguments.rounds} rounds, "
        f"{arguments.units} units, {arguments.payload_bytes / 1e6:g} MB each way"
    )
    result = {"seconds": seconds, "ratios": ratios.tolist(), "machine": machine()}
    (arguments.output / "overhead.json").write_text(json.dumps(result, indent=2) + "\n")


def collapipe_rounds(arguments: argparse.Namespace) -> list[float]:
    """Seconds from the end of a round to the end of the next."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"+model.payload_bytes={arguments.payload_bytes}",
            f"federation.rounds={arguments.rounds}",
            f"federation.num_units={arguments.units}",
            "runtime=simulation",
            f"hydra.run.dir={folder}",
        ]
        run_job([*EMPTY, *options])
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return np.diff([json.loads(line)["wall_s"] for line in lines]).tolist()


def stock_rounds(arguments: argparse.Namespace) -> list[float]:
    """The same seconds with Flower's FedAvg."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ends.json"
        options = [str(arguments.rounds), str(arguments.payload_bytes), str(output), "1"]
        if not run_simulation(HERE / "stock_fedavg", options, arguments.units):
            raise SystemExit("the stock run failed")
        return np.diff(json.loads(output.read_text())[1:]).tolist()


if __name__ == "__main__":
    main()
