"""The head's place is chosen jointly with partitions and payloads, as well as by enumeration."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made_request import request_for

from collapipe.errors import InfeasibleRoundError, PlanViolationError
from collapipe.state import ClusterState, HeadPlace, Payload
from optim.allocation.exact import exact_allocation
from optim.cluster.fronts import fronts
from optim.partition.exact import exact_partition
from optim.problem import Latency, Partition
from optim.round.problem import RoundProblem
from optim.solvers import cluster_solver
from optim.verify import verify_round
from tests.optim import rounds
from tests.optim.allocation.test_streamed import (
    Round,
    best_allocations,
    each_law,
    every_partition,
    random_round,
)
from tests.optim.drawn_requests import drawn_request
from tests.thorough import cases

PLACES: tuple[HeadPlace, ...] = ("server", "control_unit")


def offering(rng: np.random.Generator, drawn: Round) -> Round:
    """Return the round with units that allow both places of the head, or only one."""
    uplinks = []
    for uplink, cluster in zip(drawn.problem.uplinks, drawn.clusters, strict=True):
        bits = uplink.model_bits, uplink.activation_bits
        more = bits[0] * float(rng.choice([1.0, rng.uniform(1, 3)]))
        rough = float(10 ** rng.uniform(-5, -2))
        payloads = (
            Payload("float32", "float32", *bits, gradient_error=0.0, head="server"),
            Payload("int8", "float32", bits[0], 0.3 * bits[1], rough, head="server"),
            Payload("float32", "float32", more, 0.0, 0.0, head="control_unit"),
        )
        kept = [(0, 1, 2), (0, 2), (0,), (2,)][int(rng.choice(4, p=[0.6, 0.2, 0.1, 0.1]))]
        head_s = float(rng.choice([0.0, rng.uniform(0, 60)]))
        uplinks.append(
            replace(
                uplink,
                head_s=cluster.head_s,
                gradient_s=cluster.gradient_s,
                payloads=tuple(payloads[place] for place in kept),
                control_unit_head_s=head_s,
            )
        )
    queues = tuple(rng.choice([0.0, rng.uniform(0, 5)], len(uplinks)).tolist())
    problem = replace(drawn.problem, uplinks=tuple(uplinks), error_queues=queues)
    return replace(drawn, problem=problem)


def of_fronts(drawn: Round, latency: Latency) -> RoundProblem:
    """Return the round with fronts as strategies compute them."""
    problem, some = drawn.problem, drawn.clusters[0]
    pairs = zip(drawn.clusters, problem.uplinks, strict=True)
    clusters = tuple(
        ClusterState(unit, cluster.devices, 1, replace(uplink, **_first(uplink.payloads[0])))
        for unit, (cluster, uplink) in enumerate(pairs)
    )
    sizes = some.num_blocks, some.batch_size, some.max_micro_batches
    fields = {"channels": problem.channels, "queues": problem.queues}
    request = request_for(clusters, *sizes, "gpipe", **fields)
    rng = np.random.default_rng(0)

    def solve(problem, _):  # type: ignore[no-untyped-def]
        return exact_partition(problem)

    return replace(problem, fronts=fronts(request, latency, solve, rng, problem.options))


def _first(payload: Payload) -> dict[str, float]:
    return {"model_bits": payload.model_bits, "activation_bits": payload.activation_bits}


def of_all(drawn: Round) -> RoundProblem:
    """Return the round with every feasible partition of each cluster and each place of the head."""
    found = []
    for cluster, uplink in zip(drawn.clusters, drawn.problem.uplinks, strict=True):
        front: list[Partition] = []
        for head in PLACES:
            there = cluster
            if head == "control_unit":
                there = replace(cluster, head_s=uplink.control_unit_head_s, gradient_s=0.0)
            front += (replace(point, head=head) for point in every_partition(there))
        found.append(tuple(front))
    return replace(drawn.problem, fronts=tuple(found))


@each_law
@pytest.mark.parametrize(("drift", "count"), [("gamma", cases(6, 40)), ("paper", cases(3, 12))])
def test_the_places_of_heads_are_as_good_as_by_enumeration(
    drift: str, count: int, latency: Latency
) -> None:
    rng, chosen = np.random.default_rng(0), Counter[str | None]()
    for _ in range(count):
        drawn = offering(rng, random_round(rng, drift, latency))
        try:
            problem = of_fronts(drawn, latency)
        except InfeasibleRoundError:
            continue
        for each in best_allocations(problem, *rounds.best_of_payloads(of_all(drawn))):
            assert each.payload is not None
            chosen[each.partition.head] += 1
            assert each.partition.head == each.payload.head
    assert set(chosen) == set(PLACES)


def test_a_random_split_is_the_same_for_both_places() -> None:
    """It also equals the split without a choice of places, for all units."""
    request, solve = drawn_request("paper", 0), cluster_solver("no_segment_scheduling")
    offered = []
    for state in request.clusters:
        assert state.uplink is not None
        bits = state.uplink.model_bits, state.uplink.activation_bits
        payloads = (
            Payload("float32", "float32", *bits, 0.0, "server"),
            Payload("float32", "float32", bits[0], 0.0, 0.0, "control_unit"),
        )
        offered.append(replace(state, uplink=replace(state.uplink, payloads=payloads)))
    fixed = fronts(request, "overlap", solve, np.random.default_rng(0))
    request = replace(request, clusters=tuple(offered))
    chosen = fronts(request, "overlap", solve, np.random.default_rng(0))
    held = [[[point.blocks for point in front] for front in found] for found in (fixed, chosen)]
    assert held[1] == [2 * blocks for blocks in held[0]]
    assert any(held[0])


def test_a_partition_for_another_place_of_the_head_is_refused() -> None:
    """The partition is a point of the unit's front, and the unit offers a payload for that
    place."""
    rng = np.random.default_rng(1)
    while True:
        drawn = offering(rng, random_round(rng, "gamma", "overlap"))
        problem = of_fronts(drawn, "overlap")
        solution = exact_allocation(problem)
        first, *others = solution.allocations
        if len(problem.uplinks[first.unit].payloads) == 3:
            break
    other = next(p for p in problem.fronts[first.unit] if p.head != first.partition.head)
    forged = replace(first, partition=other)
    with pytest.raises(PlanViolationError, match="head"):
        verify_round(replace(solution, allocations=(forged, *others)), problem)
