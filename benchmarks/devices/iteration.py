"""An iteration on daemons with mutual TLS, against torch.distributed.pipelining on gloo without
encryption, and against a discrete-event simulation of the schedule with the measured times."""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import CLIP, RATE, Ours, add_sizes, daemons, ours, work
from benchmarks.devices.sides import WARM, about, equal_shares, ratio, save, turns
from pipeline import schedule
from pipeline.schedule import BACKWARD, FORWARD
from tests.device_cluster import device_name, even_plan, plan_of
from tests.network import Place
from tests.optim.discrete_event import Chunk, LaterStages, makespan
from tests.torch_pipelining import rival


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for cases and sizes."""
    parser.add_argument("--devices", type=at_least(1), nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "one_f_one_b"])
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    add_sizes(parser)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    print(f"{'devices':<8}{'schedule':<13}{'m':>3}  ours/torch, wall; processor; wall/schedule")
    rows = [
        _row(arguments, count, name) for count in arguments.devices for name in arguments.schedules
    ]
    save(arguments.output, "iteration", {"about": about(arguments), "rows": rows})


def _row(arguments: Namespace, count: int, name: str) -> dict[str, object]:
    m = arguments.micro_batches
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    names = [device_name(k) for k in range(count)]
    plan = even_plan(names, arguments.blocks, plan_of(names[:1], (1,), m, name))
    cut = [segment.span.blocks for segment in plan.segments]
    with (
        daemons([Place()] * count) as started,
        ours(made, plan, started) as mine,
        rival(made, cut, m, name) as theirs,
    ):
        own = [os.getpid(), *(each.process.pid for each in started.daemons)]
        mine.run()
        ideal, ran = list[float](), list[float]()

        def iterate() -> None:
            mine.step()
            phases, start = dict(mine.timer.seconds), time.perf_counter()
            mine.run()
            ran.append(time.perf_counter() - start)
            ideal.append(_ideal_s(mine, phases, name, m))

        sides = {"ours": iterate, "torch": lambda: theirs.iterate(RATE, CLIP)}
        with equal_shares({"ours": own, "torch": theirs.pids}):
            seconds, used = turns(sides, arguments.turns, {"ours": own, "torch": theirs.pids})
    wall, against = ratio(seconds["ours"], seconds["torch"]), ratio(ran[WARM:], ideal[WARM:])
    cpu = sum(used["ours"]) / sum(used["torch"])
    print(f"{count:<8}{name:<13}{m:>3}  {wall}; {cpu:.3f}; {against}", flush=True)
    return {
        "devices": count,
        "schedule": name,
        "seconds": seconds,
        "cpu_s": used,
        "run": ran,
        "ideal": ideal,
    }


def _ideal_s(mine: Ours, before: dict[str, float], name: str, m: int) -> float:
    """Simulated seconds of the schedule with the computation times of the last step and no other
    cost. The embedding is a stage too."""
    lists = schedule.build(name, len(mine.tables), m)
    took = {key: mine.timer.seconds[key] - before.get(key, 0.0) for key in ("embedding", "head")}
    embedding = Chunk(took["embedding"] / m / 2)
    forward, backward = [embedding], [embedding]
    for actions, table in zip(lists, mine.tables, strict=False):
        seconds = (table[:, 2] - table[:, 1]).tolist()
        pairs = list(zip(actions, seconds, strict=True))
        forward.append(Chunk(_mean([s for action, s in pairs if action.kind == FORWARD])))
        backward.append(Chunk(_mean([s for action, s in pairs if action.kind == BACKWARD])))
    later = LaterStages(head_s=took["head"] / m)
    first = schedule.embedding(name, len(mine.tables), m)
    return makespan((first, *lists), forward, backward, "link", later)


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0
