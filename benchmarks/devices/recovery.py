"""Time from the end of a device (SIGKILL) to the next micro-batch in the head: recovery against a
restart from a checkpoint.

A restart reads the checkpoint, connects, sends all blocks, and repeats the steps up to the same
micro-batch.
"""

import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import Ours, add_sizes, daemons, ours, work
from benchmarks.devices.sides import about, save
from collapipe.errors import StageError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from optim.partition.baselines import even_blocks
from optim.step import DEFAULT
from tests.boxes import Boxes
from tests.device_cluster import device_name, even_plan, plan_of
from tests.network import network

_LOST = 1  # the second device


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for devices, their links and sizes."""
    parser.add_argument("--devices", type=at_least(1), default=3)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    parser.add_argument("--since", type=int, default=5, help="Steps since the checkpoint.")
    parser.add_argument("--shared", action="store_true", help="One stage on all devices.")
    add_sizes(parser, blocks=12)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"recovery": [], "new start": []}
    for _ in range(arguments.turns):
        recovered, started = _turn(arguments)
        seconds["recovery"].append(recovered)
        seconds["new start"].append(started)
        print(f"recovery {recovered:.2f} s, new start {started:.2f} s", flush=True)
    ours_s, theirs_s = (statistics.median(each) for each in seconds.values())
    print(f"medians {ours_s:.2f} s and {theirs_s:.2f} s: {theirs_s / ours_s:.1f} times faster")
    save(arguments.output, "recovery", {"about": about(arguments), "seconds": seconds})


def _turn(arguments: Namespace) -> tuple[float, float]:
    """Seconds of recovery and of a restart after the same loss."""
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    names = [device_name(k) for k in range(arguments.devices)]
    plan = _plan(arguments, names)
    with (
        tempfile.TemporaryDirectory() as folder,
        network(arguments.devices, arguments.mbit * 1e6) as there,
        daemons(there.places) as started,
    ):
        checkpoint = Path(folder) / "checkpoint.safetensors"
        with ours(made, plan, started, every=1) as mine:
            for _ in range(3):
                mine.run()
                mine.step()
            state = mine.pipeline.weights() | mine.pipeline.optimizer_state()
            save_file({name: each.contiguous() for name, each in state.items()}, checkpoint)
            mine.run()
            mine.step()
            mine.segments.collect()  # the last step's replica has arrived, as after a longer step
            recovered_s, noticed_s, following = _recovery_s(mine, started)
        left = [name for number, name in enumerate(names) if number != _LOST]
        again = _plan(arguments, left)
        started_s = _new_start_s(arguments, checkpoint, again, started, following)
        return recovered_s, noticed_s + started_s


def _plan(arguments: Namespace, names: Sequence[str]) -> ClusterPlan:
    """A pipeline with equally many blocks per device, or one stage with equally many rows per
    device."""
    m = arguments.micro_batches
    if not arguments.shared:
        return even_plan(names, arguments.blocks, plan_of(names[:1], (1,), m))
    rows = even_blocks(arguments.samples // m, len(names))
    shares = tuple(map(Share, names, rows))
    stage = SegmentPlan(names[0], Span(0, arguments.blocks), shares)
    return ClusterPlan(0, (stage,), m, DEFAULT)


def _recovery_s(mine: Ours, started: Boxes) -> tuple[float, float, int]:
    """Seconds until the head receives an activation of the new plan, seconds until the loss is
    noticed, and the micro-batch of that activation."""
    marks, following = dict[str, float](), list[int]()
    submit, lose = mine.head.submit, mine.segments._replanned

    def submitting(micro_batch: int, hidden: torch.Tensor) -> None:
        if not marks:
            started.daemons[_LOST].process.kill()
            marks["lost"] = time.perf_counter()
        elif "noticed" in marks:
            marks.setdefault("next", time.perf_counter())
            following.append(micro_batch)
        submit(micro_batch, hidden)

    def losing(lost: StageError) -> ClusterPlan:
        marks.setdefault("noticed", time.perf_counter())
        return lose(lost)

    with ExitStack() as stack:
        for place, name, value in (
            (mine.head, "submit", submitting),
            (mine.segments, "_replanned", losing),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        mine.run()
    lost = marks["lost"]
    return marks["next"] - lost, marks["noticed"] - lost, following[0]


def _new_start_s(
    arguments: Namespace, checkpoint: Path, plan: ClusterPlan, started: Boxes, following: int
) -> float:
    """Seconds until the head receives the micro-batch ``following`` of the interrupted step."""
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    begin = time.perf_counter()
    for name, tensor in load_file(checkpoint).items():
        (made.state if "/" in name else made.start)[name] = tensor
    with ours(made, plan, started) as mine:
        for _ in range(arguments.since):
            mine.run()
            mine.step()
        reached = list[float]()
        submit = mine.head.submit

        def submitting(micro_batch: int, hidden: torch.Tensor) -> None:
            if micro_batch == following:
                reached.append(time.perf_counter())
            submit(micro_batch, hidden)

        mine.head.submit = submitting  # type: ignore[method-assign]
        mine.run()
    return reached[0] - begin
