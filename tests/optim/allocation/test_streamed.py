"""A streamed round over fronts is as good as over all partitions.

Fronts come from ``exact_partition`` for the possible uplink times of each unit. The reference does
not use fronts or times: it tries every δ and m of every unit.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.state import AffineLaw, DeviceProfile
from optim.allocation.curves import PowerCurves, power_curves, relaxed_curves
from optim.allocation.exact import exact_allocation
from optim.allocation.options import OptionTable, option_table
from optim.cluster.problem import activation_times
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Latency, Partition
from optim.round.problem import Allocation, RoundProblem
from optim.verify import verify_cluster, verify_round
from tests.optim import rounds
from tests.optim.partition_references import EveryPartition
from tests.thorough import cases

LAWS: tuple[Latency, ...] = get_args(Latency)
each_law = pytest.mark.parametrize("latency", LAWS)


@dataclass(frozen=True)
class Round:
    """Clusters, and a round whose own fronts do not belong to them."""

    clusters: tuple[ClusterProblem, ...]
    problem: RoundProblem

    def of_fronts(self) -> RoundProblem:
        """Return the round with each cluster's verified front."""
        problem, fronts = self.problem, []
        times = activation_times(problem.uplinks, problem.channels, problem.options)
        for cluster, activation_s in zip(self.clusters, times, strict=True):
            with_uplinks = replace(cluster, activation_s=activation_s)
            try:
                solution = exact_partition(with_uplinks)
            except InfeasibleRoundError:
                fronts.append(())
                continue
            verify_cluster(solution, with_uplinks)
            fronts.append(solution.front)
        return replace(problem, fronts=tuple(fronts))

    def of_all(self) -> RoundProblem:
        """Return the round with every feasible partition of each cluster."""
        return replace(self.problem, fronts=tuple(map(every_partition, self.clusters)))


def every_partition(cluster: ClusterProblem) -> tuple[Partition, ...]:
    every, later_s = EveryPartition.of(cluster), max(cluster.head_s, cluster.gradient_s)
    latencies, slowest = every.latency(np.zeros(())), np.maximum(every.slowest, later_s / every.m)
    columns = (every.m.tolist(), latencies.tolist(), slowest.tolist())
    return tuple(map(Partition, map(tuple, every.blocks.tolist()), *columns))


def random_cluster(
    rng: np.random.Generator, num_blocks: int, most_micro_batches: int, latency: Latency
) -> ClusterProblem:
    """Draw up to three devices; in half of the draws ties are likely."""
    count = int(rng.integers(1, 4))
    u, v, w, ell = rng.uniform(0, [[2.0], [3.0], [1.0], [5.0]], (4, count))
    if rng.random() < 0.5:
        u, v, w, ell = (rng.choice([0.5, 1.0, 2.0], (4, count)).T * [1.0, 1.0, 0.5, 2.0]).T
    devices = tuple(
        DeviceProfile(
            f"device-{k}",
            AffineLaw(*map(float, law)),
            None if rng.random() < 0.7 else int(rng.integers(1, 4)),
        )
        for k, law in enumerate(zip(u, v, w, ell, strict=True))
    )
    later_s = (float(rng.choice([0.0, rng.uniform(0, 40)])) for _ in range(2))
    return ClusterProblem(devices, num_blocks, 8, most_micro_batches, latency, (0.0,), *later_s)


def random_round(
    rng: np.random.Generator, drift: str, latency: Latency, fading: str = "none"
) -> Round:
    """Draw up to three units and two channels."""
    sizes = int(rng.integers(2, 5)), 8 if drift == "gamma" else 4
    problem = rounds.random_round(rng, drift, fading, most_units=3, most_channels=2)
    clusters = tuple(random_cluster(rng, *sizes, latency) for _ in problem.uplinks)
    options = replace(problem.options, uplink="streamed")
    return Round(clusters, replace(problem, num_blocks=sizes[0], options=options))


def best_allocations(problem: RoundProblem, most: int, least: float) -> tuple[Allocation, ...]:
    """Return the verified allocations after comparing their number and objective with ``most`` and
    ``least``. Return () if no unit can be scheduled."""
    if not most:
        with pytest.raises(InfeasibleRoundError):
            exact_allocation(problem)
        return ()
    solution = exact_allocation(problem)
    verify_round(solution, problem)
    assert len(solution.allocations) == most
    assert solution.certificate.objective == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert 0 <= solution.certificate.gap <= 1e-9
    return solution.allocations


def check(drawn: Round) -> Counter[str]:
    """Compare the answer with enumeration; count feasible rounds and special cases."""
    problem = drawn.of_fronts()
    allocations = best_allocations(problem, *rounds.best_by_enumeration(drawn.of_all()))
    seen = Counter({"feasible": 1} if allocations else {})
    for each in allocations:
        alone = exact_partition(drawn.clusters[each.unit])
        kept = {(point.blocks, point.num_micro_batches) for point in alone.front}
        chosen = each.partition.blocks, each.partition.num_micro_batches
        seen["not on the front of the pipeline alone"] += chosen not in kept
        front = problem.fronts[each.unit]
        seen["several points of one S"] += len({p.num_segments for p in front}) < len(front)
    return seen


@each_law
@pytest.mark.parametrize(
    ("drift", "fading", "count"),
    [
        ("gamma", "none", cases(20, 60)),
        ("paper", "none", cases(4, 20)),
        ("gamma", "rayleigh", cases(4, 12)),
        ("paper", "rayleigh", 4),
    ],
)
def test_fronts_have_the_best_partitions(
    drift: str, fading: str, count: int, latency: Latency
) -> None:
    """This holds for all deadlines and powers, given each unit's possible uplink times."""
    rng, seen = np.random.default_rng(0), Counter[str]()
    for _ in range(count):
        seen += check(random_round(rng, drift, latency, fading))
    assert seen["feasible"] > count / 3
    assert seen["not on the front of the pipeline alone"] > count / 10
    assert seen["several points of one S"] > 0 or count < 20


@each_law
def test_the_options_of_an_interval_include_the_cheapest(latency: Latency) -> None:
    """A search considers fewer options of each unit and channel if its interval is shorter."""
    rng, left_out = np.random.default_rng(1), 0
    for _ in range(25):
        drawn = random_round(rng, "paper", latency)
        problem = drawn.of_fronts() if rng.random() < 0.6 else drawn.problem
        try:
            table = option_table(problem)
        except InfeasibleRoundError:
            continue
        curves = power_curves(problem, table, relaxed_curves(problem, table).loads)
        first = float(curves.finish_s.min())
        for deadline in first + np.geomspace(1e-3, 10, 30) * first:
            least = cheapest(curves, deadline, table)
            for stop in (np.nextafter(deadline, np.inf), deadline * (1 + 10 ** rng.uniform(-3, 0))):
                kept = curves.take(curves.useful(float(deadline), float(stop)))
                np.testing.assert_allclose(cheapest(kept, deadline, table), least, rtol=1e-9)
                left_out += len(curves) - len(kept)
    assert left_out > 1000


def cheapest(curves: PowerCurves, deadline_s: float, table: OptionTable) -> np.ndarray:
    """Return the least S + p of each pair, [N, J]."""
    found = np.full(table.limits_w.shape[1:], np.inf)
    powers, _ = curves.power(deadline_s)
    costs = np.where(curves.finish_s <= deadline_s, curves.segments + powers, np.inf)
    units, _, _ = curves.places
    np.minimum.at(found, units, costs)
    return found
