"""Plans whose stages several devices share, against the exact pipeline of single devices.

    python sharing.py --clusters 25

Clusters are drawn from the presets ``edge`` and ``paper``, with links of 100 Mbit/s and 1 Gbit/s
(of ``edge``). Blocks are BERT base's with 64 tokens, L = 12, b = 64, m ≤ 64, law ``flow_shop``.
Either LoRA of rank 8 or all weights train. If memory binds, a device can hold only ⌈2L/K⌉ of the
blocks for a whole batch, or more blocks for fewer rows.

Prints for each case how far the best plan is below the exact pipeline (means with 95 % intervals).
Prints how far the plans of Asteroid's and AdaPtis' rules are from it, how often they equal it, and
how long ``shared`` takes. Writes ``sharing.json``. Every solution is verified and has gap 0.

Then measures times and gaps for 10 to 24 devices and L = 24, and the time of a joint round. It also
measures the gain of counting memory for each device's place under 1F1B instead of the first place.
There devices have 0.6 of the binding memory; law ``overlap``, m ≤ 16.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from arguments import at_least, writable
from machine import record

from collapipe import config
from collapipe.devices.presets import HardwareCluster, PaperCluster
from collapipe.errors import InfeasibleRoundError
from collapipe.models.cost import measure_cost
from collapipe.models.lora import LoraSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.runs.evidence import over_seeds
from collapipe.state import AffineLaw, BlockCost, DeviceProfile, MemoryBudget, SharingLaw
from optim.dssra import Dssra
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolution
from optim.sharing.baselines import adaptis, asteroid
from optim.sharing.exact import shared_partition
from optim.step import DEFAULT, in_flight
from optim.verified import solve_verified
from optim.verify import verify_cluster
from tests.optim.drawn_requests import drawn_request

BATCH, TOKENS, BLOCKS = 64, 64, 12
BERT = TransformerSpec(BLOCKS, 1, 768, 12, 3072, 0.0)
COLUMNS = [
    *("clusters", "best plan", "plans that share", "Asteroid, found", "AdaPtis, found"),
    *("six devices, ms (slowest)", "exact, ms"),
]
Solver = Callable[[ClusterProblem, np.random.Generator], ClusterSolution]


def cost_of(adapters: bool) -> BlockCost:
    """The cost of a block of BERT base's size."""
    return measure_cost(LoraSpec(BERT, rank=8) if adapters else BERT, TOKENS, BATCH)


def devices_of(
    preset: str, count: int, mbit: int | None, cost: BlockCost, rng: np.random.Generator
) -> list[DeviceProfile]:
    """Random devices, which may share stages."""
    cluster = config.load_overrides([f"cluster={preset}", "cluster.num_devices=9"]).build("cluster")
    drawn = [cluster._device(k, cost, rng) for k in range(count)]
    if isinstance(cluster, HardwareCluster):
        assert mbit is not None
        hop_s, sync_s = cost.hop_bits / (mbit * 1e6), 8 * cost.trained_bytes / (mbit * 1e6)
        drawn = [replace(each, time=replace(each.time, w=hop_s)) for each in drawn]
        return [replace(each, sharing=SharingLaw(sync_s), energy=None) for each in drawn]
    assert isinstance(cluster, PaperCluster)
    rates = (cluster.hop_bits / each.time.ell for each in drawn)
    return [
        replace(each, sharing=SharingLaw(8 * cost.trained_bytes / rate))
        for each, rate in zip(drawn, rates, strict=True)
    ]


def with_memory(
    devices: list[DeviceProfile], cost: BlockCost, binds: bool, part: float = 1.0
) -> list[DeviceProfile]:
    """Give the devices memory for the whole model, or for a share of it if it ``binds``, times
    ``part``."""
    held = math.ceil(2 * BLOCKS / len(devices)) if binds else BLOCKS
    parts = cost.batch_segment_bytes, cost.batch_block_bytes
    memory = MemoryBudget(
        cost.segment_needs(held, 0.0) * (1 + 1e-9) * part,
        cost.segment_bytes,
        cost.block_bytes,
        0.0,
        *parts,
        cost.trained_bytes,
    )
    return [
        replace(
            each,
            max_blocks=None,
            memory=memory,
            sharing=each.sharing and replace(each.sharing, memory=memory),
        )
        for each in devices
    ]


def timed(solve: Solver, problem: ClusterProblem) -> tuple[ClusterSolution, float]:
    """A verified solution, and the seconds to solve."""
    began = time.perf_counter()
    solution = solve(problem, np.random.default_rng(0))
    seconds = time.perf_counter() - began
    verify_cluster(solution, problem)
    return solution, seconds


def row(
    preset: str, mbit: int | None, adapters: bool, binds: bool, clusters: int
) -> dict[str, Any]:
    """The figures of a case, over clusters of 3 to 6 devices."""
    cost = cost_of(adapters)
    gains, ours_s, theirs_s, forms = [], [], [], []
    six_s = []
    above_best: dict[str, list[float]] = {"asteroid": [], "adaptis": []}
    for seed in range(clusters):
        for count in (3, 4, 5, 6):
            rng = np.random.default_rng((seed, count))
            devices = with_memory(devices_of(preset, count, mbit, cost, rng), cost, binds)
            problem = ClusterProblem(tuple(devices), BLOCKS, BATCH, 64, "flow_shop")
            single, single_s = timed(exact_partition, problem)
            shared, shared_s = timed(shared_partition, problem)
            assert shared.certificate.gap == 0
            gains.append(shared.best.latency_s / single.best.latency_s - 1)
            ours_s.append(shared_s)
            six_s += [shared_s] if count == 6 else []
            theirs_s.append(single_s)
            forms.append(any(len(each.devices) > 1 for each in shared.best.stages))
            for name, solve in (("asteroid", asteroid), ("adaptis", adaptis)):
                try:
                    found, _ = timed(solve, problem)
                except InfeasibleRoundError:
                    continue
                above_best[name].append(found.best.latency_s / shared.best.latency_s - 1)
    gain = over_seeds(gains)
    return {
        "preset": preset,
        "mbit": mbit,
        "trains": "LoRA" if adapters else "all weights",
        "memory": "binding" if binds else "ample",
        "clusters": len(gains),
        "below_exact_pipeline": {"mean": gain.mean, "low": gain.low, "high": gain.high},
        "plans_that_share": statistics.fmean(forms),
        **{
            name: {
                "plans": len(each),
                "above_best": statistics.fmean(each) if each else None,
                "found_best": sum(one < 1e-9 for one in each) / len(gains),
            }
            for name, each in above_best.items()
        },
        "shared_ms": {"median": 1e3 * statistics.median(ours_s), "most": 1e3 * max(ours_s)},
        "six_devices_ms": 1e3 * statistics.median(six_s),
        "exact_ms": {"median": 1e3 * statistics.median(theirs_s), "most": 1e3 * max(theirs_s)},
    }


def large(count: int, clusters: int) -> dict[str, object]:
    """Seconds and gaps of ``shared`` for different devices, L = 24, m ≤ 64."""
    seconds, gaps, gains, cost = list[float](), list[float](), list[float](), cost_of(adapters=True)
    for seed in range(clusters):
        rng = np.random.default_rng((seed, count))
        devices = devices_of("edge", count, 100, cost, rng)
        for binds in (False, True):
            own = with_memory(devices, cost, binds)
            problem = ClusterProblem(tuple(own), 2 * BLOCKS, BATCH, 64, "flow_shop")
            solution, took = timed(shared_partition, problem)
            single, _ = timed(exact_partition, problem)
            seconds.append(took)
            gaps.append(solution.certificate.gap)
            assert count > 10 or gaps[-1] == 0
            gains.append(solution.best.latency_s / single.best.latency_s - 1)
    return {
        "devices": count,
        "plans": len(seconds),
        "median_s": statistics.median(seconds),
        "most_s": max(seconds),
        "gap": {"median": statistics.median(gaps), "most": max(gaps)},
        "below_exact_pipeline": statistics.fmean(gains),
    }


def placed(clusters: int) -> list[dict[str, object]]:
    """Compare plans that count memory by place with plans that count each device as the first
    one."""
    found = []
    for adapters, count, solve in itertools.product(
        (True, False), (4, 6, 8), (exact_partition, shared_partition)
    ):
        cost, gains, seconds = cost_of(adapters), list[float](), list[float]()
        for seed in range(clusters):
            rng = np.random.default_rng((seed, count))
            devices = with_memory(devices_of("edge", count, 100, cost, rng), cost, True, 0.6)
            kept = in_flight(DEFAULT, count)
            problem = ClusterProblem(tuple(devices), BLOCKS, BATCH, 16, "overlap", in_flight=kept)
            began = time.perf_counter()
            plan = solve_verified(problem, solve, np.random.default_rng(0))
            seconds.append(time.perf_counter() - began)
            assert plan.certificate.gap < 1e-9
            gains.append(plan.best.latency_s / solve(problem, rng).best.latency_s - 1)
        gain = over_seeds(gains)
        found.append(
            {
                "trains": "LoRA" if adapters else "all weights",
                "devices": count,
                "solver": plan.certificate.solver,
                "below_first_place": {"mean": gain.mean, "low": gain.low, "high": gain.high},
                "ms": {"median": 1e3 * statistics.median(seconds), "most": 1e3 * max(seconds)},
            }
        )
    return found


def joint(rounds: int, sets: int) -> dict[str, object]:
    """Seconds and gaps of a round's plan with J = 10 channels and N = 30 units, each with ``sets``
    sets of six different devices."""
    seconds: dict[str, list[float]] = {"never": [], "auto": []}
    gaps = list[float]()
    for seed in range(rounds):
        request = drawn_request("paper", seed, num_units=30)
        rng = np.random.default_rng(seed)
        laws = (AffineLaw(float(u), 0.002, 1e-3, 3e-3) for u in rng.uniform(0.005, 0.05, 10**4))
        clusters = tuple(
            replace(
                state,
                devices=tuple(
                    replace(
                        each, name=f"{each.name}-{k}", time=next(laws), sharing=SharingLaw(0.01)
                    )
                    for k in range(sets)
                    for each in state.devices
                ),
            )
            for state in request.clusters
        )
        enlarged = replace(request, clusters=clusters)
        for sharing, taken in seconds.items():
            began = time.perf_counter()
            plan = Dssra(sharing=sharing).plan_round(enlarged, np.random.default_rng(0))
            taken.append(time.perf_counter() - began)
        gaps.append(plan.certificate.gap)  # of ``auto``, which runs last
    ratios = [a / n for a, n in zip(seconds["auto"], seconds["never"], strict=True)]
    return {
        "devices": 6 * sets,
        **{f"{name}_ms": 1e3 * statistics.median(each) for name, each in seconds.items()},
        "ratio": statistics.median(ratios),
        "gap": statistics.median(gaps),
    }


def cases() -> Iterator[tuple[str, int | None, bool, bool]]:
    """Yield preset, link rate, whether only adapters train, and whether memory binds."""
    for adapters in (True, False):
        for binds in (False, True):
            yield from (("edge", mbit, adapters, binds) for mbit in (100, 1000))
            yield "paper", None, adapters, binds


def _cells(found: dict[str, Any]) -> list[str]:
    link = "" if found["mbit"] is None else f", {found['mbit']} Mbit/s"
    gain, times = found["below_exact_pipeline"], found["shared_ms"]
    rules = (found[name] for name in ("asteroid", "adaptis"))
    return [
        f"{found['preset']}{link}, {found['trains']}, memory {found['memory']}",
        "{:.0%} ({:.0%} … {:.0%})".format(
            *(round(gain[each], 2) + 0.0 for each in ("mean", "low", "high"))
        ),
        f"{found['plans_that_share']:.0%}",
        *(f"{each['above_best']:+.1%}, {each['found_best']:.0%}" for each in rules),
        f"{found['six_devices_ms']:.0f} ({times['most']:.0f})",
        f"{found['exact_ms']['median']:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clusters", type=at_least(1), default=25, help="of each number of devices"
    )
    parser.add_argument("--load", default="unknown", help="other work of this machine")
    parser.add_argument("--output", type=writable, default=Path("results/sharing.json"))
    arguments = parser.parse_args()
    found, rows = [], []
    print(" | ".join(COLUMNS))
    for case in cases():
        found.append(row(*case, arguments.clusters))
        rows.append(_cells(found[-1]))
        print(" | ".join(rows[-1]), flush=True)
    content = {
        **record(arguments.load, range(arguments.clusters), COLUMNS, rows),
        "cases": found,
        "large": [large(count, 10) for count in (10, 12, 16, 24)],
        "joint_rounds": [joint(7, sets=1), joint(7, sets=2)],
        "placed": placed(6),
    }
    print(json.dumps({key: content[key] for key in ("large", "joint_rounds", "placed")}))
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
