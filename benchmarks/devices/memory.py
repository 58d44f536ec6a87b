"""Peak memory of a device with a share of the blocks, against a process that trains the whole
model.

Peaks are of the whole resident set, with interpreter and libraries. Also compares the memory that a
segment adds to a warm daemon with the planned bytes of its place.
"""

import multiprocessing
import re
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import CLIP, RATE, SEED, add_sizes, daemons, ours, work
from benchmarks.devices.sides import about, save
from collapipe.models.cost import measure_cost
from collapipe.models.dropout import DropoutKey
from collapipe.plan import ClusterPlan
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from pipeline.schedule import kept
from tests.boxes import Boxes
from tests.device_cluster import Work, device_name, even_plan, plan_of
from tests.network import Place

_STEPS = 2  # from the second step on the optimiser has its moments


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=4)
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "one_f_one_b"])
    parser.add_argument("--every", type=at_least(1), default=1, help="Steps between two replicas.")
    parser.add_argument("--room", type=float, help="memory of a device by the largest segment's")
    add_sizes(parser, dim=768, blocks=12, samples=8)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    rows = []
    for schedule in arguments.schedules:
        planned = _planned(arguments, schedule)
        split, added, own = _devices(arguments, schedule, max(planned))
        whole = _unsplit(arguments, schedule)
        listed = ", ".join(f"{each / 1e6:,.0f}" for each in split)
        print(
            f"{schedule}: devices {listed} MB, unsplit {whole / 1e6:,.0f} MB: "
            f"{max(split) / whole:.3f}; the control unit {own / 1e6:,.0f} MB",
            flush=True,
        )
        for place, (counted, taken) in enumerate(zip(planned, added, strict=True)):
            print(
                f"  stage {place}: segment {taken / 1e6:,.0f} MB, planned {counted / 1e6:,.0f} MB: "
                f"{counted / taken:.3f}",
                flush=True,
            )
        rows.append(
            {
                "schedule": schedule,
                "devices": split,
                "segments": added,
                "planned": planned,
                "unsplit": whole,
                "own": own,
            }
        )
    save(arguments.output, "memory", {"about": about(arguments), "rows": rows})


def peak_bytes(pid: int | str = "self") -> int:
    """The peak resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak(pid: int | str = "self") -> int:
    """Reset a process's peak to its resident memory; return it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def _planned(arguments: Namespace, schedule: str) -> list[float]:
    """The bytes of each device's segment that the planner counts."""
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    cost = measure_cost(made.spec, arguments.tokens, arguments.samples)
    m, blocks = arguments.micro_batches, arguments.blocks // arguments.devices
    counts = kept(schedule, arguments.devices, m)
    return [cost.segment_needs(blocks, arguments.samples / m, n / m) for n in counts]


def _devices(arguments: Namespace, schedule: str, most: float) -> tuple[list[int], list[int], int]:
    """Peaks of each device, of its segment alone, and of the control unit; ``most``: planned
    bytes."""
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    made.needed_bytes = most
    memory = f"{arguments.room * most / 1e6:.0f}MB" if arguments.room else "8GB"
    names = [device_name(k) for k in range(arguments.devices)]
    like = plan_of(names[:1], (1,), arguments.micro_batches, schedule)
    plan = even_plan(names, arguments.blocks, like)
    with daemons([Place()] * arguments.devices, memory) as started:
        _train(work(64, arguments.blocks, arguments.samples, 8), plan, started, arguments.every)
        pids = [each.process.pid for each in started.daemons]
        before = list(map(reset_peak, pids))
        _train(made, plan, started, arguments.every)
        peaks = list(map(peak_bytes, pids))
    added = [peak - idle for peak, idle in zip(peaks, before, strict=True)]
    return peaks, added, peak_bytes()


def _train(made: Work, plan: ClusterPlan, started: Boxes, every: int) -> None:
    with ours(made, plan, started, every) as mine:
        for _ in range(_STEPS + 1):  # the end of the last run shows that the step before has ended
            mine.run()
            mine.step()
        mine.segments.collect()


def _unsplit(arguments: Namespace, schedule: str) -> int:
    """Peak of a separate process that trains the whole model."""
    sizes = arguments.dim, arguments.blocks, arguments.samples, arguments.tokens
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, sizes, arguments.micro_batches, schedule).result()


def train(sizes: tuple[int, int, int, int], num_micro_batches: int, schedule: str) -> int:
    """Train the whole model in one thread; return this process's peak."""
    torch.set_num_threads(1)
    made = work(*sizes)
    embedding, blocks, part = made.parts()
    plan = plan_of([device_name(0)], (len(blocks),), num_micro_batches, schedule)
    made.start.clear()
    with inline_pipeline(plan, embedding, blocks, LocalHead(part)) as pipeline:
        for _ in range(_STEPS):
            pipeline.run(made.batch, DropoutKey(SEED, 0, 0))
            pipeline.step(RATE, CLIP)
    return peak_bytes()
