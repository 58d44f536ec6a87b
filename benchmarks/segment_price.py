"""Modelled seconds to reach a loss, with and without a price on segments in Γ.

    python segment_price.py --seeds 20

Six units share two channels; DSSRA schedules them with ``strategy.segment_price=paper`` or
``none``. (If every unit had a channel, queues would be 0 and the price would change nothing.) On
the default devices a small Transformer trains on dates. A run's time is its modelled clock after
the first round whose training loss is at most the target. In the paper's world rounds are only
planned, and the time is the clock after the last round. Runs of one seed have equal rows, initial
weights, devices and channels.

Prints a row for each world: the mean number of segments, mean seconds with 95 % intervals
(Student's t), and their difference in percent, paired by seed. Writes ``segment_price.json``.
Finished runs are not repeated.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from arguments import at_least, writable
from finished import finished, remember
from machine import machine

from collapipe.cli.run import run_job
from collapipe.runs.evidence import Interval, over_seeds

PRICES = "paper", "none"
TARGET = 3.5
_RUN = (
    "federation.num_units=6",
    "channel.num_channels=2",
    "federation.rounds=7",
    "federation.local_steps=5",
    "federation.eval_every=99",
    "federation.checkpoint_every=0",
    "federation.weighting=uniform",
    "task.train_rows=1500",
    "task.validation_rows=1",
    "task.test_rows=1",
    "batch_size=32",
    "pipeline.num_micro_batches=4",
    "model.num_blocks=6",
    "model.num_decoder_blocks=1",
    "model.dim=64",
    "model.num_heads=4",
    "model.feed_forward_dim=128",
    "model.dropout=0",
    "optimizer.lr=5e-3",
    "optimizer.warmup_steps=20",
)
WORLDS = {
    "Table II, planned only": (
        "cluster=paper",
        "channel=paper",
        "environment=fading",
        "strategy.latency=bound",
        "strategy.sharing=never",
        "strategy.energy=adapters",
        "pipeline.num_micro_batches=32",
        "federation.rounds=12",
        "framework.train=false",
    ),
    "`cluster=uneven`": (),
}


class Outcome(NamedTuple):
    """A run's modelled seconds, and the mean number of segments of its plans."""

    seconds: float
    segments: float


def outcome(run_dir: Path) -> Outcome:
    """Read a run's records. Raises ``SystemExit`` if it trained and did not reach the target."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["train_loss"] is not None]
    reached = [line for line in trained if line["train_loss"] <= TARGET] if trained else lines[-1:]
    if not reached:
        raise SystemExit(f"{run_dir}: ended with a loss of {lines[-1]['train_loss']:.2f}")
    plans = [cluster for line in lines for cluster in line["plan"]["clusters"]]
    return Outcome(reached[0]["clock_s"], fmean(len(plan["segments"]) for plan in plans))


def run(folder: Path, world: str, price: str, seed: int) -> Outcome:
    """Run once, unless finished, and read the outcome."""
    run_dir = folder / f"{list(WORLDS).index(world)}-{price}-{seed}"
    options = [*_RUN, *WORLDS[world], f"strategy.segment_price={price}", f"seed={seed}"]
    if not finished(run_dir, options):
        run_job([*options, f"hydra.run.dir='{run_dir}'"])
        remember(run_dir, options)
    return outcome(run_dir)


def shown(interval: Interval, form: str) -> str:
    """The interval as text for the pages."""
    return "{} ({} … {})".format(*(format(each, form) for each in (interval.mean, *interval.ends)))


def row(folder: Path, world: str, seeds: int) -> list[str]:
    """The row of a world in the table."""
    found = {price: [run(folder, world, price, n) for n in range(seeds)] for price in PRICES}
    pairs = zip(*found.values(), strict=True)
    change = over_seeds(100 * none.seconds / paper.seconds - 100 for paper, none in pairs)
    segments = [f"{fmean(each.segments for each in runs):.2f}" for runs in found.values()]
    times = [shown(over_seeds(each.seconds for each in runs), ",.1f") for runs in found.values()]
    return [world, *segments, *times, shown(change, "+.1f")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/segment_price"))
    parser.add_argument("--seeds", type=at_least(1), default=20)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = [row(arguments.output.resolve(), world, arguments.seeds) for world in WORLDS]
    print("\n".join(" | ".join(each) for each in rows))
    written = {"seeds": arguments.seeds, "target": TARGET, "rows": rows, "machine": machine()}
    text = json.dumps(written, indent=2, ensure_ascii=False)
    (arguments.output / "segment_price.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
