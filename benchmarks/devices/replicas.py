"""Cost of copies of the blocks on the control unit: seconds and bytes of a step, by the number
of steps between two copies. Copies are sent while the next step computes, on the same links."""

import statistics
import time
from argparse import ArgumentParser, Namespace

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import add_sizes, daemons, ours, work
from benchmarks.devices.sides import about, save
from pipeline.devices.control_unit.segments import RemoteSegments
from tests.device_cluster import device_name, even_plan, plan_of
from tests.network import network


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, links, steps between two copies, and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=3)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--every", type=int, nargs="+", default=[0, 1, 5, 20])
    parser.add_argument("--passes", type=at_least(1), default=3)
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    add_sizes(parser)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    names = [device_name(k) for k in range(arguments.devices)]
    like = plan_of(names[:1], (1,), arguments.micro_batches)
    plan = even_plan(names, arguments.blocks, like)
    seconds: dict[int, list[float]] = {every: [] for every in arguments.every}
    sent = dict.fromkeys(arguments.every, 0.0)
    with (
        network(arguments.devices, arguments.mbit * 1e6) as there,
        daemons(there.places) as started,
    ):
        for every in arguments.every * arguments.passes:
            with ours(made, plan, started, every) as mine:
                mine.run()
                before = _received(mine.segments)
                start = time.perf_counter()
                for _ in range(arguments.turns):
                    mine.step_and_run()
                seconds[every].append((time.perf_counter() - start) / arguments.turns)
                sent[every] = (_received(mine.segments) - before) / arguments.turns
    print(f"{'every':>6}{'s a step':>10}{'least':>8}{'most':>8}{'MB a step':>11}")
    for every, found in seconds.items():
        figures = statistics.median(found), min(found), max(found)
        print(
            f"{every:>6}{figures[0]:>10.3f}{figures[1]:>8.3f}{figures[2]:>8.3f}"
            f"{sent[every] / 1e6:>11.2f}"
        )
    result = {"about": about(arguments), "seconds": seconds, "bytes": sent}
    save(arguments.output, "replicas", result)


def _received(segments: RemoteSegments) -> int:
    """The bytes that devices have sent on their control streams."""
    return sum(each.control.bytes_in for each in segments._placed.connections.values())
