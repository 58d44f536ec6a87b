"""Delay of rounds whose plans may share stages, against both methods that they combine.

    python shared_rounds.py --seeds 20

Three units take part in each of five planned rounds, with channels and powers that minimise the
round's time. CollaPipe plans with solver ``shared``. It combines the exact pipeline of single
devices and VanillaFL. As in the paper, VanillaFL's devices hold the whole encoder, and its time
includes no sync. The cases combine presets ``paper`` and ``edge``, and LoRA or all weights; blocks
have BERT base's size, the law is ``flow_shop``. Either activations are uploaded too, or the head is
on the control unit. All times are modelled. Prints how far the delay is below each of the two,
means over the seeds with 95 % intervals (Student's t). Writes ``shared_rounds.json``.
"""

import argparse
import itertools
import json
from pathlib import Path

from arguments import at_least, writable
from machine import machine

from collapipe.runs.evidence import over_seeds
from reproduction.scheduling import Overrides, run_histories, total_s

ROUNDS = 5
_BERT = "model.dim=768", "model.num_heads=12", "model.feed_forward_dim=3072", "task.max_length=64"
_ALL = "strategy=all", "strategy.latency=flow_shop"
TRAINS = {"LoRA": ("adapter=lora",), "all weights": ()}
SENT = {"activations too": (), "model alone": ("channel.activation_bits=0",)}
COLUMNS = ["rounds", "below the exact pipeline", "below VanillaFL", "seeds above both"]


def worlds(preset: str, trains: str, sent: str) -> dict[str, tuple[Overrides, Overrides]]:
    """World and strategy of CollaPipe and of both compared methods."""
    units = "federation.num_units=3", "environment=static", f"cluster={preset}", f"channel={preset}"
    world = *units, *_BERT, *TRAINS[trains], *SENT[sent]
    return {
        "shared": (world, (*_ALL, "strategy.partition=shared")),
        "exact": (world, _ALL),
        "vanilla_fl": ((*world, "framework=vanilla_fl"), _ALL),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=at_least(2), default=20)
    parser.add_argument("--output", type=writable, default=Path("results/shared_rounds.json"))
    arguments = parser.parse_args()
    rows, cases = [], {}
    print(" | ".join(COLUMNS))
    for preset, trains, sent in itertools.product(("paper", "edge"), TRAINS, SENT):
        delays = []
        for seed in range(arguments.seeds):
            runs = run_histories(seed, ROUNDS, worlds(preset, trains, sent))
            delays.append({name: total_s(run) for name, run in runs.items()})
        above = sum(each["shared"] > max(each["exact"], each["vanilla_fl"]) for each in delays)
        cells = [f"{preset}, {trains}, {sent}"]
        for parent in ("exact", "vanilla_fl"):
            below = over_seeds(100 * (1 - each["shared"] / each[parent]) for each in delays)
            cells.append(f"{below.mean:.1f} % ({below.low:.1f} … {below.high:.1f})")
        rows.append([*cells, str(above)])
        cases[cells[0]] = delays
        print(" | ".join(rows[-1]), flush=True)
    about = {**machine(), "seeds": list(range(arguments.seeds))}
    content = {"about": about, "columns": COLUMNS, "rows": rows, "delay_s": cases}
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
