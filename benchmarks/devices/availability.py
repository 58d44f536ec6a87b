"""The useful share of the time if a device is repeatedly killed (SIGKILL) and restarted.

The share is the number of completed steps, times the seconds of a step without kills, over the
total time. Rounds follow each other as in a run: each starts with the devices that answer, and with
the weights and moments of the last round. Seconds of a step include the starts of rounds on both
sides. Every device has a share of a core, so the loss of a device makes steps slower.
"""

import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import add_sizes, daemons, ours, work
from benchmarks.devices.sides import about, save
from tests.boxes import Boxes
from tests.device_cluster import Work, even_plan, plan_of
from tests.network import cpu_quota, network

_BUSY = 8.0  # a device's weight on a busy machine, in processes


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, their links, kills and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=4)
    parser.add_argument("--cores", type=float, default=0.35, help="Of each device.")
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--kill-s", type=float, default=60, help="Seconds between two kills.")
    parser.add_argument("--back-s", type=float, default=5, help="Until the device starts again.")
    parser.add_argument("--round-s", type=float, default=30, help="After which a round ends.")
    parser.add_argument("--every", type=at_least(1), default=2, help="Steps between two replicas.")
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    add_sizes(parser, blocks=12, samples=16)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    count, cores = arguments.devices, arguments.cores
    with ExitStack() as stack:
        quota = [stack.enter_context(cpu_quota(cores, _BUSY)) for _ in range(count)]
        there = stack.enter_context(network(count, arguments.mbit * 1e6))
        started = stack.enter_context(daemons(there.places))
        for box, group in zip(started.daemons, quota, strict=True):
            group.write_text(str(box.process.pid))
        calm = [_train(arguments, made, started, arguments.kill_s)]
        threading.Thread(target=_kill, args=(arguments, started, quota), daemon=True).start()
        steps, took_s, events = _train(arguments, made, started, arguments.kills * arguments.kill_s)
        calm.append(_train(arguments, made, started, arguments.kill_s))
    step_s = sum(seconds for _, seconds, _ in calm) / sum(number for number, _, _ in calm)
    share = steps * step_s / took_s
    print(*events, f"{steps} steps in {took_s:.0f} s; {step_s:.2f} s each without", sep="\n")
    print(f"{len(events)} losses: useful share of the time {share:.3f}")
    found = {"steps": steps, "seconds": took_s, "calm": calm, "events": events, "share": share}
    save(arguments.output, "availability", {"about": about(arguments), **found})


def _train(
    arguments: Namespace, made: Work, started: Boxes, seconds: float
) -> tuple[int, float, list[str]]:
    """Train whole rounds for at least ``seconds``; return steps, seconds taken, and events."""
    steps, events, begin = 0, list[str](), time.perf_counter()
    while (round_began := time.perf_counter()) - begin < seconds:
        alive = [box.name for box in started.daemons if box.process.poll() is None]
        like = plan_of(alive[:1], (1,), arguments.micro_batches)
        with ours(made, even_plan(alive, arguments.blocks, like), started, arguments.every) as mine:
            while time.perf_counter() - round_began < arguments.round_s:
                mine.run()
                mine.step()
            made.start |= mine.pipeline.weights()
            made.state |= mine.pipeline.optimizer_state()
            steps, events = steps + mine.steps, events + mine.segments.events
    return steps, time.perf_counter() - begin, events


def _kill(arguments: Namespace, started: Boxes, quota: Sequence[Path]) -> None:
    """Kill and restart devices in turn; the first kill is after half an interval."""
    time.sleep(arguments.kill_s / 2)
    for number in range(arguments.kills):
        device, begin = number % arguments.devices, time.perf_counter()
        started.daemons[device].process.kill()
        time.sleep(arguments.back_s)
        quota[device].write_text(str(started.again(device).process.pid))
        if number < arguments.kills - 1:
            time.sleep(arguments.kill_s - (time.perf_counter() - begin))
