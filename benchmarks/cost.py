"""Predicted and measured peak memory of a segment's process, and seconds of its forward and
backward.

    python benchmarks/cost.py --output outputs/cost

Three models with random weights, blocks of some MFLOPs a token, AdamW, one thread. Predicted memory
is the planner's δ · block_bytes. It is compared with the peak of a new process for each case, whose
malloc returns large blocks (``MALLOC_MMAP_THRESHOLD_=131072``). It is also compared with a process
with glibc's default settings, whose heap fragments. Predicted times follow from a law u·b̂ + v that
is fitted to one block. Prints both tables and writes ``cost.json``.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from arguments import at_least, writable
from cost_segment import ADAMW, MODELS, TOKENS
from cost_times import chunk_times
from machine import machine

from collapipe.models.cost import measure_cost

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
SEGMENTS = ((2, 4, 4), (4, 4, 4), (4, 8, 2))  # blocks, micro-batches, samples per micro-batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/cost"))
    parser.add_argument("--repetitions", type=at_least(1), default=9)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = machine() | {"transformers": transformers.__version__, "tokens": TOKENS, "seed": 0}
    print(about)
    print(
        f"{'model':<6} {'δ':>2} {'m':>2} {'b̂':>2} {'predicted':>10} {'measured':>10} {'ratio':>6}"
        f"   {'glibc as it is':>14} {'ratio':>6}"
    )
    memory = [row for name in MODELS for row in peaks(name)]
    print(f"{'model':<6} {'phase':<8} {'δ':>2} {'b̂':>2} {'predicted':>10} {'measured':>10} ratio")
    times = []
    for name in MODELS:
        rows = chunk_times(name, arguments.repetitions)
        for row in rows:
            print(
                f"{row['model']:<6} {row['phase']:<8} {row['blocks']:>2} "
                f"{row['micro_batch_size']:>2} {row['predicted_s'] * 1e3:>7.1f} ms "
                f"{row['measured_s'] * 1e3:>7.1f} ms {row['ratio']:>5.2f}",
                flush=True,
            )
        times += rows
    result = {"machine": about, "memory": memory, "times": times}
    (arguments.output / "cost.json").write_text(json.dumps(result, indent=2) + "\n")


def peaks(name: str) -> list[dict[str, object]]:
    """Measure, print and return a row for each of ``SEGMENTS``."""
    rows: list[dict[str, object]] = []
    for blocks, count, size in SEGMENTS:
        cost = measure_cost(MODELS[name](), TOKENS, count * size, ADAMW)
        predicted = blocks * cost.block_bytes
        measured, as_it_is = (peak(name, blocks, count, size, env) for env in (GIVES_BACK, {}))
        print(
            f"{name:<6} {blocks:>2} {count:>2} {size:>2} {predicted / 1e6:>7.1f} MB "
            f"{measured / 1e6:>7.1f} MB {predicted / measured:>6.2f}   "
            f"{as_it_is / 1e6:>11.1f} MB {predicted / as_it_is:>6.2f}",
            flush=True,
        )
        rows.append(
            {
                "model": name,
                "blocks": blocks,
                "micro_batches": count,
                "micro_batch_size": size,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "measured_bytes_glibc_as_it_is": as_it_is,
            }
        )
    return rows


def peak(name: str, blocks: int, count: int, size: int, malloc: dict[str, str]) -> int:
    """Peak bytes of a separate process."""
    program = Path(__file__).with_name("cost_memory.py")
    command = [sys.executable, str(program), name, *map(str, (blocks, count, size))]
    ended = subprocess.run(
        command, env=os.environ | malloc, check=True, stdout=subprocess.PIPE, text=True
    )
    return int(ended.stdout)


if __name__ == "__main__":
    main()
