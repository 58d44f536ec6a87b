"""Growth of a round's time and memory with the number of units, of which ten train.

    python -m benchmarks.scale --units 10 100 1000 --runtimes local simulation --planned 10000
    python -m benchmarks.scale --model bert --channels 3 --rounds 4 --units 6 12 --planned

Each run is a separate process, with a tiny model or a BERT of 13 million weights, AdamW, 8 rows a
unit and ten channels. Prints the seconds to the end of the first round and the median of later
rounds. Prints the peak memory of the largest process that is not a simulation's worker, and of the
largest worker. Prints the exponent by which each of these grows. Then prints the seconds of the
scheduler alone, for units whose clusters and uplinks are drawn from the presets.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from collapipe import config
from collapipe.state import BlockCost, ClusterState, Estimates
from optim.planner import RoundRequest
from tests.federated import TINY

CHANNELS = 10
BERT = (
    *("task=classification", "data=synthetic", "data.max_eval_samples=20", "task.vocabulary=600"),
    *("model=huggingface", "model.family=bert", "batch_size=4", "federation.local_steps=1"),
    *("optimizer=adamw", "optimizer.warmup_steps=0", "federation.checkpoint_every=0"),
    "model.config={hidden_size:512,num_hidden_layers:4,num_attention_heads:8,intermediate_size:2048}",
)
# options of a model, and the option for its number of rows
MODELS = {"tiny": (TINY, "task.train_rows"), "bert": (BERT, "data.max_train_samples")}
_WORKER = "ray::ClientApp"  # the name that Ray gives its processes
COST = BlockCost(9.1e8, 1.8e9, 1.57e6, 1.57e6, 2.9e8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=at_least(1), nargs="+", default=[10, 100, 1000])
    parser.add_argument("--runtimes", nargs="+", default=["local"])
    parser.add_argument("--rounds", type=at_least(1), default=8)
    parser.add_argument("--planned", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--channels", type=at_least(1), default=CHANNELS)
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    print(
        f"{'runtime':<12}{'units':>7}{'first s':>9}{'round s':>9}{'memory MB':>11}{'worker MB':>11}"
    )
    for runtime in arguments.runtimes:
        found = []
        for units in arguments.units:
            model, rows = MODELS[arguments.model]
            options = [*model, f"{rows}={8 * units}", f"channel.num_channels={arguments.channels}"]
            found.append(row := measured(runtime, units, arguments.rounds, options))
            figures = f"{row[0]:>9.1f}{row[1]:>9.2f}{row[2]:>11.0f}{row[3]:>11.0f}"
            print(f"{runtime:<12}{units:>7}{figures}", flush=True)
        for (a, before), (b, after) in pairwise(zip(arguments.units, found, strict=True)):
            pairs = [(x, y) for x, y in zip(before, after, strict=True) if x]
            grew = [math.log(y / x) / math.log(b / a) for x, y in pairs]
            print(f"exponents from {a} to {b}: " + ", ".join(f"{each:.2f}" for each in grew))
    for units in arguments.planned:
        print(f"scheduler, {units} units: {statistics.median(planned(units)):.2f} s a round")


def measured(
    runtime: str, units: int, rounds: int, options: list[str]
) -> tuple[float, float, float, float]:
    """Seconds until the first round's end, median seconds of later rounds, peak memory in MB, and
    peak memory of a worker (0 without workers)."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["federation.eval_every=99999", f"federation.num_units={units}"]
        own += [f"runtime={runtime}", f"federation.rounds={rounds}", f"hydra.run.dir={folder}/run"]
        command = [sys.executable, "-m", "collapipe", "run", *options, *own]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = [0, 0]
        threading.Thread(target=_watch, args=(process.pid, peak), daemon=True).start()
        if process.wait():
            raise SystemExit(f"{runtime} with {units} units: status {process.returncode}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    ends = [json.loads(line)["wall_s"] for line in lines]
    return ends[0], float(np.median(np.diff(ends))), peak[0] / 1e6, peak[1] / 1e6


def _watch(pid: int, peak: list[int]) -> None:
    """Record the peak memory of the run's largest process and of its largest worker."""
    root = psutil.Process(pid)
    while root.is_running():
        with suppress(psutil.Error):  # a process has ended
            for each in (root, *root.children(recursive=True)):
                worker = " ".join(each.cmdline()).startswith(_WORKER)
                peak[worker] = max(peak[worker], each.memory_info().rss)
        time.sleep(0.2)


def planned(units: int) -> list[float]:
    """Seconds to plan each of three rounds."""
    settings = config.load_overrides([f"channel.num_channels={CHANNELS}"])
    cluster, channel = settings.build("cluster"), settings.build("channel")
    strategy, rng = settings.build("strategy"), np.random.default_rng(0)
    channels, states = channel.draw(rng), []
    for n in range(units):
        devices = cluster.draw(COST, n, rng)
        uplink = channel.draw_uplink(5e6, 5e7, rng)
        states.append(ClusterState(n, devices, 50, uplink))
    taken = []
    for round_ in range(1, 4):
        request = RoundRequest(
            round=round_,
            clusters=tuple(states),
            num_blocks=12,
            batch_size=64,
            local_steps=2,
            num_segments=None,
            num_micro_batches=8,
            schedule="one_f_one_b",
            channels=channels,
            queues=tuple(rng.uniform(0, 20, units).tolist()),
            losses=tuple(rng.uniform(0, 5, units).tolist()),
            learning_rate=1e-3,
            estimates=Estimates(1.0, None, 1.0),
        )
        began = time.perf_counter()
        strategy.plan_round(request, rng)
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
