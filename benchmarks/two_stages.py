"""Interleaved pipelines with two stages on one device, against plans with one stage per device.

    python two_stages.py --clusters 6

Devices are drawn from the preset ``edge``, with sufficient memory; blocks of BERT base's size, 64
tokens, L = 12, b = 64. A discrete-event simulation runs the forward and backward of each
micro-batch on each device, which sends while it computes; the head takes no time. Each device
executes the most urgent ready job, by the best of three rules.

A local search moves single blocks until no move is faster. It runs for each order of each set of
devices and m = 2, 4 … 64. It searches plans with one stage per device, and pipelines that pass all
devices, or the first one, a second time. Prints how far the best of the latter is from the best
with one stage per device, and from the plan that may share stages. Writes ``two_stages.json``.
"""

import argparse
import heapq
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from arguments import at_least, writable
from machine import machine
from sharing import BATCH, BLOCKS, cost_of, devices_of, with_memory

from collapipe.runs.evidence import over_seeds
from collapipe.state import DeviceProfile
from collapipe.step_law import FORWARD_SHARE
from optim.problem import ClusterProblem
from optim.sharing.exact import shared_partition

COLUMNS = ["clusters", "two stages against one", "against plans that may share stages"]
COUNTS = (2, 4, 8, 16, 32, 64)  # m
FEW = 1.2  # only cuts that take at most 1.2 times as long as the best one so far are improved
Stages = list[tuple[int, int]]  # device and blocks, in pipeline order
Job = tuple[int, bool, int]  # stage, whether it is backward, micro-batch
RULES: tuple[Callable[[Job], object], ...] = (
    lambda job: (not job[1], job[2], -job[0]),  # backward first, then the first micro-batch
    lambda job: (not job[1], -job[0], job[2]),  # backward first, then the last stage
    lambda job: (not job[1], job[0], job[2]),  # backward first, then the first stage
)


def batch_s(
    devices: Sequence[DeviceProfile], stages: Stages, m: int, rule: Callable[[Job], object]
) -> float:
    """Simulated seconds of a batch."""
    laws, size = [devices[k].time for k, _ in stages], BATCH / m
    whole = [law.compute(held, size) for law, (_, held) in zip(laws, stages, strict=True)]
    ready: dict[int, list[tuple[object, Job]]] = {k: [] for k, _ in stages}
    busy, free_s = dict.fromkeys(ready, False), dict[tuple[int, bool], float]()
    events = [(0.0, (0, False, i), True) for i in range(m)]  # when, job, whether it arrives
    now = 0.0
    while events:
        now, job, arrives = heapq.heappop(events)
        stage, backward, i = job
        device = stages[stage][0]
        if arrives:
            heapq.heappush(ready[device], (rule(job), job))
        else:
            busy[device] = False
            turns = not backward and stage == len(stages) - 1
            following = stage if turns else stage + (-1 if backward else 1)
            if following >= 0:
                at = now
                if stages[following][0] != device:
                    hop_s = laws[stage].hop(size) / 2  # one direction
                    at = max(now, free_s.get((device, backward), 0.0)) + hop_s
                    free_s[device, backward] = at
                heapq.heappush(events, (at, (following, backward or turns, i), True))
        if ready[device] and not busy[device]:
            busy[device] = True
            _, taken = heapq.heappop(ready[device])
            share = 1 - FORWARD_SHARE if taken[1] else FORWARD_SHARE
            heapq.heappush(events, (now + share * whole[taken[0]], taken, False))
    return now


def fastest_s(devices: Sequence[DeviceProfile], orders: Sequence[Sequence[int]]) -> float:
    """Seconds of the fastest cut found over these orders of devices."""

    def timed(stages: Stages, m: int) -> float:
        return min(batch_s(devices, stages, m, rule) for rule in RULES)

    best = np.inf
    for order, m in itertools.product(orders, COUNTS):
        stages = _by_speed(devices, order)
        taken = timed(stages, m)
        while taken < FEW * best:
            best = min(best, taken)
            near = min(_moved(stages), key=lambda each: timed(each, m), default=stages)
            if timed(near, m) >= taken * (1 - 1e-9):
                break
            stages, taken = near, timed(near, m)
    return float(best)


def _by_speed(devices: Sequence[DeviceProfile], order: Sequence[int]) -> Stages:
    """Stages with blocks in proportion to speed, at least one per stage."""
    speeds = np.array([1 / devices[k].time.u / order.count(k) for k in order])
    held = np.ones(len(order), dtype=int)
    for _ in range(BLOCKS - len(order)):
        held[((held + 1) / speeds).argmin()] += 1
    return list(zip(order, held.tolist(), strict=True))


def _moved(stages: Stages) -> Iterator[Stages]:
    for source, sink in itertools.permutations(range(len(stages)), 2):
        if stages[source][1] > 1:
            near = list(stages)
            for place, more in ((source, -1), (sink, 1)):
                near[place] = near[place][0], near[place][1] + more
            yield near


def row(adapters: bool, mbit: int, count: int, clusters: int) -> tuple[list[float], list[float]]:
    """Relative additional time of two stages per device, over one and over plans with shared
    stages."""
    cost, single, shared = cost_of(adapters), list[float](), list[float]()
    once = [p for size in range(1, count + 1) for p in itertools.permutations(range(count), size)]
    twice = [again for p in once if len(p) > 1 for again in ((*p, *p), (*p, p[0]))]
    for seed in range(clusters):
        rng = np.random.default_rng((seed, count))
        devices = with_memory(devices_of("edge", count, mbit, cost, rng), cost, binds=False)
        one_s, two_s = fastest_s(devices, once), fastest_s(devices, twice)
        problem = ClusterProblem(tuple(devices), BLOCKS, BATCH, 64, "overlap")
        best_s = min(one_s, shared_partition(problem).best.latency_s)
        single.append(two_s / one_s - 1)
        shared.append(two_s / best_s - 1)
    return single, shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=at_least(2), default=6, help="of each number of devices")
    parser.add_argument("--output", type=writable, default=Path("results/two_stages.json"))
    arguments = parser.parse_args()
    rows = []
    print(" | ".join(COLUMNS))
    for adapters, mbit, count in itertools.product((True, False), (100, 1000), (2, 3, 4)):
        found = row(adapters, mbit, count, arguments.clusters)
        means = (over_seeds(each) for each in found)
        trains = "LoRA" if adapters else "all weights"
        cells = (f"{each.mean:+.1%} ({each.low:+.1%} … {each.high:+.1%})" for each in means)
        rows.append([f"{count} devices, {mbit} Mbit/s, {trains}", *cells])
        print(" | ".join(rows[-1]), flush=True)
    content = {"about": machine(), "columns": COLUMNS, "rows": rows}
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
