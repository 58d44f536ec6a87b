"""Peak memory of a device that holds a share of the blocks, against a process that trains the whole
model: of all its resident set, interpreter and libraries included."""

import multiprocessing
import re
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.devices.cluster import CLIP, RATE, SEED, add_sizes, daemons, ours, work
from benchmarks.devices.sides import about, save
from collapipe.models.dropout import DropoutKey
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from tests.device_cluster import device_name, even_plan, plan_of
from tests.network import Place

_STEPS = 2  # from the second one on the optimiser has its moments


def add_arguments(parser: ArgumentParser) -> None:
    """Devices and sizes."""
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "one_f_one_b"])
    parser.add_argument("--every", type=int, default=1, help="Steps between two replicas.")
    add_sizes(parser, dim=768, blocks=12, samples=8)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    rows = []
    for schedule in arguments.schedules:
        split, own = _devices(arguments, schedule)
        whole = _unsplit(arguments, schedule)
        listed = ", ".join(f"{each / 1e6:,.0f}" for each in split)
        print(
            f"{schedule}: devices {listed} MB, unsplit {whole / 1e6:,.0f} MB: "
            f"{max(split) / whole:.3f}; the control unit {own / 1e6:,.0f} MB",
            flush=True,
        )
        rows.append({"schedule": schedule, "devices": split, "unsplit": whole, "own": own})
    save(arguments.output, "memory", {"about": about(arguments), "rows": rows})


def peak_bytes(pid: int | str = "self") -> int:
    """The most that was resident of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak(pid: int | str = "self") -> int:
    """From now on a process's peak is what is resident; how much that is."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def _devices(arguments: Namespace, schedule: str) -> tuple[list[int], int]:
    """Of each device, and of the control unit."""
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    names = [device_name(k) for k in range(arguments.devices)]
    like = plan_of(names[:1], (1,), arguments.micro_batches, schedule)
    plan = even_plan(names, arguments.blocks, like)
    with (
        daemons([Place()] * arguments.devices) as started,
        ours(made, plan, started, arguments.every) as mine,
    ):
        for _ in range(_STEPS + 1):  # the last one's end shows that the one before it has stepped
            mine.run()
            mine.step()
        mine.segments.collect()
        return [peak_bytes(each.process.pid) for each in started.daemons], peak_bytes()


def _unsplit(arguments: Namespace, schedule: str) -> int:
    """In a process of its own."""
    sizes = arguments.dim, arguments.blocks, arguments.samples, arguments.tokens
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, sizes, arguments.micro_batches, schedule).result()


def train(sizes: tuple[int, int, int, int], num_micro_batches: int, schedule: str) -> int:
    """The whole model in one thread, in as many micro-batches; this process's peak."""
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
