"""Steps of planned cuts and of neighbouring cuts, on random devices with links of limited rate.

The neighbours are the cuts that the law predicts to be fastest. Cuts take turns; the plan should be
the fastest measured cut.
"""

import os
import random
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import Ours, add_sizes, apart, daemons, ours, work
from benchmarks.devices.sides import about, limited, save
from client_app.devices.law_of_rounds import updated
from client_app.devices.measured_law import measured_law
from collapipe.plan import ClusterPlan
from collapipe.process.host import this_host
from collapipe.state import AffineLaw, DeviceProfile
from collapipe.step_law import StepLaw, interval
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Partition
from optim.simulated_plan import as_measured, simulated, simulated_front
from tests.boxes import Boxes
from tests.device_cluster import Work, device_name, even_plan, plan_of
from tests.network import network

_SCHEDULE = "one_f_one_b"
_CORES = 0.08, 0.35  # minimum and maximum of a device
_DEVICES = 2, 4
_MBIT = 50, 100, 1000
_ROUNDS = 3  # before the plan
_WARM = 1  # warm-up steps after a new cut


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for clusters and sizes."""
    parser.add_argument("--clusters", type=at_least(1), default=10)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first cluster.")
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--micro-batches", type=at_least(1), default=4)
    parser.add_argument("--steps", type=at_least(1), default=4, help="Of a turn.")
    parser.add_argument("--control-unit-cores", type=float, default=0.6)
    add_sizes(parser, dim=128, blocks=10, samples=16)


def main(arguments: Namespace) -> None:
    torch.set_num_threads(1)
    made = work(arguments.dim, arguments.blocks, arguments.samples, arguments.tokens)
    rows = []
    for seed in range(arguments.first, arguments.first + arguments.clusters):
        rows.append(_cluster(arguments, made, seed))
        save(arguments.output, "neighbours", {"about": about(arguments), "rows": rows})
    held = sum(bool(row["fastest"]) for row in rows)
    print(f"the plan was the fastest, or within its interval, in {held} of {len(rows)} clusters")


def _cluster(arguments: Namespace, made: Work, seed: int) -> dict[str, object]:
    """Measure a cluster's plan and its neighbours."""
    drawn = random.Random(seed)  # noqa: S311 - a benchmark's clusters
    cores = [round(drawn.uniform(*_CORES), 2) for _ in range(drawn.randint(*_DEVICES))]
    mbit = drawn.choice(_MBIT)
    with (
        network(len(cores), mbit * 1e6) as there,
        apart(there.places) as places,
        daemons(places) as started,
        ExitStack() as quotas,
    ):
        bench = _Bench(arguments, made, started)
        bench.warm_up()
        pids = [os.getpid(), *(each.process.pid for each in started.daemons)]
        for own, pid in zip((arguments.control_unit_cores, *cores), pids, strict=True):
            quotas.enter_context(limited(pid, own))
        law, problem, planned = bench.planned()
        cuts = [planned, *_nearest(planned, problem, law, arguments.neighbours)]
        measured = [list[float]() for _ in cuts]
        for _ in range(arguments.turns):
            for cut, known in zip(cuts, measured, strict=True):
                known.extend(bench.seconds(cut.blocks))
    medians = [statistics.median(each) for each in measured]
    _, most_s = interval(min(medians), law.spread)
    print(f"cluster {seed}: {mbit} Mbit/s, cores {cores}, spread {law.spread:.2f}")
    for cut, measured_s in zip(cuts, medians, strict=True):
        print(
            f"  {cut.blocks!s:<16} planned {cut.latency_s:.2f} s, measured {measured_s:.2f} s"
            f", {cut.latency_s / measured_s:.2f}",
            flush=True,
        )
    return {
        "seed": seed,
        "mbit": mbit,
        "cores": cores,
        "spread": law.spread,
        "cuts": [each.blocks for each in cuts],
        "planned_s": [each.latency_s for each in cuts],
        "measured_s": measured,
        "fastest": medians[0] <= most_s,
    }


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs cuts of a model on a cluster."""

    arguments: Namespace
    made: Work
    started: Boxes

    @property
    def names(self) -> list[str]:
        return [device_name(k) for k in range(len(self.started.daemons))]

    def plan(self, blocks: Sequence[int]) -> ClusterPlan:
        """The plan of a cut; devices may hold no block."""
        held = [(name, each) for name, each in zip(self.names, blocks, strict=True) if each]
        names, cut = zip(*held, strict=True)
        return plan_of(names, cut, self.arguments.micro_batches, _SCHEDULE)

    def warm_up(self) -> None:
        """Run once, so that libraries load all they load on first use."""
        like = plan_of(self.names[:1], (1,), self.arguments.micro_batches, _SCHEDULE)
        with ours(self.made, even_plan(self.names, self.arguments.blocks, like), self.started) as m:
            m.run()

    def seconds(self, blocks: Sequence[int]) -> list[float]:
        """Seconds of each step of a turn."""
        with ours(self.made, self.plan(blocks), self.started) as mine:
            return self._steps(mine)

    def planned(self) -> tuple[StepLaw, ClusterProblem, Partition]:
        """Measure an even cut, then the best cuts by the updated law, as rounds do; then plan."""
        each, more = divmod(self.arguments.blocks, len(self.names))
        blocks = tuple(each + (k < more) for k in range(len(self.names)))
        law, _ = self._measured(blocks)
        for _ in range(_ROUNDS - 1):
            _, best = self._planned(law)
            now, step_s = self._measured(best.blocks)
            law = updated(law, now, planned_s=best.latency_s, step_s=step_s)
        return law, *self._planned(law)

    def _planned(self, law: StepLaw) -> tuple[ClusterProblem, Partition]:
        problem = self._problem(law)
        front = simulated_front(exact_partition(problem).front, problem, law, _SCHEDULE)
        return problem, min(front, key=lambda each: each.latency_s)

    def _measured(self, blocks: Sequence[int]) -> tuple[StepLaw, float]:
        """Return the measured law of a cut, whose devices are described with 1 s per block, and the
        seconds of a step."""
        plan = self.plan(blocks)
        with ours(self.made, plan, self.started) as mine:
            self._steps(mine, 2 * self.arguments.steps)
            mine.segments.collect()
            times, hosts = mine.segments.step_times(), mine.segments.hosts
        assert times is not None
        machines = {**hosts, None: this_host()}
        m, samples = self.arguments.micro_batches, self.arguments.samples
        one = AffineLaw(m / samples, 0.0, 0.0, 0.0)
        described = {name: DeviceProfile(name, one) for name in self.names}
        return measured_law(plan, times, machines, described, samples), times.step_s

    def _problem(self, law: StepLaw) -> ClusterProblem:
        m, total, samples = law.num_micro_batches, self.arguments.blocks, self.arguments.samples
        devices = tuple(
            DeviceProfile(name, AffineLaw(each.slowness * m / samples, 0.0, 0.0, 0.0))
            for name, each in sorted(law.devices.items())
        )
        return as_measured(ClusterProblem(devices, total, samples, m, "overlap"), law)

    def _steps(self, mine: Ours, count: int | None = None) -> list[float]:
        mine.run()
        for _ in range(_WARM):
            mine.step_and_run()
        seconds = []
        for _ in range(count or self.arguments.steps):
            start = time.perf_counter()
            mine.step_and_run()
            seconds.append(time.perf_counter() - start)
        return seconds


def _nearest(
    planned: Partition, problem: ClusterProblem, law: StepLaw, most: int
) -> list[Partition]:
    """Of the cuts that move one block of the plan, return the fastest by the law."""
    near = (simulated(each, problem, law, _SCHEDULE) for each in _moved(planned))
    return sorted(near, key=lambda each: each.latency_s)[:most]


def _moved(planned: Partition) -> Iterator[Partition]:
    for source, sink in permutations(range(len(planned.blocks)), 2):
        blocks = list(planned.blocks)
        blocks[source] -= 1
        blocks[sink] += 1
        if blocks[source] >= 0:
            yield replace(planned, blocks=tuple(blocks))
