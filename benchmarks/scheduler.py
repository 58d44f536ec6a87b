"""Cost and benefit of scheduling: DSSRA against simple rules, and its share of a round's time.

    python benchmarks/scheduler.py --output outputs/scheduler

Prints these sections and writes ``scheduler.json``:

1. total virtual delay of DSSRA against random, loss-only and delay-only, the units' shares of the
   rounds and the queues (the experiment ``fig11``; 95 % intervals, paired by seed);
2. seconds of a round with each framework, and CollaPipe with fewer bits against VanillaFL;
3. CollaPipe by DSSRA in several precisions against VanillaFL by DSSRA, under fading (``fig11``);
4. the share of planning in a round that trains, with default options;
5. seconds to schedule 1,000 rounds of 30 units of six devices, in two worlds.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from arguments import at_least, writable
from machine import machine

from reproduction import fig11, frameworks
from reproduction.figure import Evidence, reduction
from reproduction.scheduling import run_histories, total_s

Record = dict[str, object]
_SENT = {name: sent for name, sent in frameworks.PAYLOADS.items() if name != "bfloat16"}
_DSSRA = ("strategy=dssra", "strategy.segment_price=paper")
_KINDS = {"static": ("cluster.num_devices=6",), "mobile": ("cluster=paper", "environment=mobile")}


def main() -> None:
    sections: dict[str, Callable[[argparse.Namespace], Record]] = {
        "strategies": strategies,
        "frameworks": compared,
        "precisions": precisions,
        "planning": planning,
        "speed": speed,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=writable, default=Path("outputs/scheduler"))
    parser.add_argument("--seeds", type=at_least(1), default=8)
    parser.add_argument("--rounds", type=at_least(1), default=1000, help="of the section speed")
    parser.add_argument("--units", type=at_least(1), default=30, help="likewise")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    found: Record = {"machine": machine(), "seeds": list(range(arguments.seeds))}
    for name in arguments.only:
        print(f"── {name}", flush=True)
        found[name] = sections[name](arguments)
        (arguments.output / "scheduler.json").write_text(json.dumps(found, indent=2) + "\n")


def strategies(arguments: argparse.Namespace) -> Record:
    """Compare DSSRA with the simple rules."""
    return _record(
        fig11.FIGURE.evidence(range(arguments.seeds)), ("reduction of DSSRA, V = ", "DSSRA, V = ")
    )


def compared(arguments: argparse.Namespace) -> Record:
    """Compare the frameworks."""
    return _record(frameworks.FIGURE.evidence(range(arguments.seeds)), ("",))


def _record(evidence: Evidence, beginnings: Sequence[str]) -> Record:
    """All claims and findings; print those that start with one of ``beginnings``."""
    found = [*evidence.claims, *evidence.findings]
    for each in found:
        if each.text.startswith(tuple(beginnings)):
            low, high = each.ours.ends
            print(f"{each.text}: {each.ours.mean:.4g} ({low:.4g} … {high:.4g}) {each.unit}")
    return {each.text: asdict(each.ours) | {"unit": each.unit} for each in found}


def precisions(arguments: argparse.Namespace) -> Record:
    """How far the total delay of 200 rounds is below VanillaFL's, paired by seed."""
    rival = {frameworks.LABELS[frameworks.RIVAL]: (f"framework={frameworks.RIVAL}",)}
    runs = {name: (sent, _DSSRA) for name, sent in {**_SENT, **rival}.items()}
    with ProcessPoolExecutor(2) as pool:
        seeds = list(
            pool.map(partial(run_histories, rounds=200, runs=runs), range(arguments.seeds))
        )
    found: Record = {}
    for name in _SENT:
        below = reduction(seeds, name, *rival, total_s)
        low, high = below.ends
        print(f"{name}: {below.mean:.1f} % ({low:.1f} … {high:.1f}) below VanillaFL", flush=True)
        found[name] = asdict(below)
    return found


def planning(arguments: argparse.Namespace) -> Record:
    """Seconds of planning and of the rounds in a run with default options."""
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, ["federation.rounds=4", "federation.eval_every=99"])
        seconds = [line["seconds"] for line in _lines(folder)]
    plan, rounds = (sum(each[name] for each in seconds) for name in ("plan", "round"))
    print(f"planning {plan:.3f} s of {rounds:.1f} s in rounds: {100 * plan / rounds:.3f} %")
    return {"plan_s": plan, "round_s": rounds, "share_percent": 100 * plan / rounds}


def speed(arguments: argparse.Namespace) -> Record:
    """Wall and processor seconds of whole runs that only schedule."""
    found: Record = {}
    for name, options in _KINDS.items():
        rounds, units = arguments.rounds, arguments.units
        with tempfile.TemporaryDirectory() as folder:
            began, used = time.perf_counter(), _processor_s()
            size = (f"federation.rounds={rounds}", f"federation.num_units={units}")
            _run(folder, ["framework.train=false", *size, *options])
            wall_s, processor_s = time.perf_counter() - began, _processor_s() - used
            planned_s = sum(line["seconds"]["plan"] for line in _lines(folder))
        print(
            f"{name}: {rounds} rounds of {units} units in {wall_s:.1f} s, {processor_s:.1f} s of a "
            f"processor; {planned_s:.1f} s of it decide"
        )
        found[name] = {"wall_s": wall_s, "processor_s": processor_s, "decide_s": planned_s}
    return found


def _run(folder: str, options: Sequence[str]) -> None:
    """Run in a separate process, so that start and imports count."""
    command = [sys.executable, "-m", "collapipe", "run", *options]
    subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)


def _lines(folder: str) -> list[dict[str, dict[str, float]]]:
    text = (Path(folder) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _processor_s() -> float:
    """Processor seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
