"""Daemons of unequal speed behind links of a rate: steps of the planner's split and of an even one,
against the time that the planner expects with laws fitted in the same run, and its lower bound."""

import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack

import torch

from benchmarks.devices.cluster import add_sizes, daemons, ours, work
from benchmarks.devices.laws import SIZES, Laws, fitted
from benchmarks.devices.sides import about, limited, save
from collapipe.plan import ClusterPlan, segment_plans
from optim.latency import partition_of
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Partition
from tests.boxes import Boxes
from tests.device_cluster import Work, device_name, even_plan, plan_of
from tests.network import network


def add_arguments(parser: ArgumentParser) -> None:
    """Devices, links and sizes."""
    parser.add_argument("--cores", type=float, nargs="+", default=[0.3, 0.25, 0.2, 0.15])
    parser.add_argument("--control-unit-cores", type=float, default=0.5)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 50])
    parser.add_argument("--most-micro-batches", type=int, default=8)
    add_sizes(parser, blocks=12)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    print(f"{'Mbit/s':>7} {'plan':<6}{'blocks':<14}{'m':>3}{'measured':>10}{'expected':>10}  ratio")
    rows = [row for mbit in arguments.mbit for row in _rows(arguments, made, mbit)]
    save(arguments.output, "plans", {"about": about(arguments), "rows": rows})


def _rows(arguments: Namespace, made: Work, mbit: float) -> list[dict[str, object]]:
    count = len(arguments.cores)
    names = [device_name(k) for k in range(count)]
    one = plan_of(names[:1], (1,), arguments.samples // min(SIZES))
    with (
        network(count, mbit * 1e6) as there,
        daemons(there.places) as started,
        ExitStack() as quotas,
    ):
        calibrating = even_plan(names, arguments.blocks, one)
        with ours(made, calibrating, started) as mine:
            mine.run()  # libraries load what they load on first use
        pids = [os.getpid(), *(each.process.pid for each in started.daemons)]
        for cores, pid in zip((arguments.control_unit_cores, *arguments.cores), pids, strict=True):
            quotas.enter_context(limited(pid, cores))
        with ours(made, calibrating, started) as mine:
            laws = fitted(mine)
        problem = _problem(arguments, laws)
        solved = exact_partition(problem)
        blocks, left = divmod(arguments.blocks, count)
        even = tuple(blocks + (k < left) for k in range(count))
        split = {
            "exact": solved.best,
            "even": partition_of(problem, even, solved.best.num_micro_batches),
        }
        return [
            _row(
                arguments, made, started, mbit, name, problem, point, solved.certificate.lower_bound
            )
            for name, point in split.items()
        ]


def _problem(arguments: Namespace, laws: Laws) -> ClusterProblem:
    """The way to the first device is a stage of the flow shop as well, wherever it stands in it."""
    samples = arguments.samples
    return ClusterProblem(
        laws.devices,
        arguments.blocks,
        samples,
        arguments.most_micro_batches,
        "overlap",
        head_s=laws.head_s * samples,
        gradient_s=laws.first_hop_s * samples,
    )


def _row(
    arguments: Namespace,
    made: Work,
    started: Boxes,
    mbit: float,
    name: str,
    problem: ClusterProblem,
    point: Partition,
    bound_s: float,
) -> dict[str, object]:
    segments = segment_plans(problem.devices, point.blocks)
    plan = ClusterPlan(1, segments, point.num_micro_batches, "gpipe")
    with ours(made, plan, started) as mine:
        mine.run()
        seconds = list[float]()
        for _ in range(arguments.turns):
            start = time.perf_counter()
            mine.step_and_run()
            seconds.append(time.perf_counter() - start)
    measured = statistics.median(seconds)
    print(
        f"{mbit:>7g} {name:<6}{point.blocks!s:<14}{point.num_micro_batches:>3}"
        f"{measured:>8.2f} s{point.latency_s:>8.2f} s  {measured / point.latency_s:.3f}; "
        f"of the bound's throughput {bound_s / measured:.3f}",
        flush=True,
    )
    return {
        "mbit": mbit,
        "plan": name,
        "blocks": point.blocks,
        "micro_batches": point.num_micro_batches,
        "seconds": seconds,
        "expected_s": point.latency_s,
        "bound_s": bound_s,
        "laws": [
            [each.time.u, each.time.v, each.time.w, each.time.ell] for each in problem.devices
        ],
    }
