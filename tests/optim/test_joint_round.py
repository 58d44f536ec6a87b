"""Searching the shared stages of few units gives as good a round as searching all units."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import RoundPlan
from collapipe.state import AffineLaw, ClusterState, SharingLaw
from optim import joint_round
from optim.cluster.cache import Front
from optim.cluster.fronts import bound_points, fronts
from optim.dssra import Dssra
from optim.latency import batch_s
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterProblem
from optim.sharing.bounds import least_batch_s
from optim.sharing.exact import shared_partition
from optim.verified import solve_verified
from tests.optim.drawn_requests import drawn_request
from tests.optim.sharing.instances import drawn, linked, tight
from tests.thorough import cases, chosen


def with_sharing(preset: str, seed: int, num_units: int = 10) -> RoundRequest:
    """Draw a round in which all devices may share stages and differ in speed."""
    request, rng = drawn_request(preset, seed, num_units), np.random.default_rng(seed)
    clusters = (
        replace(
            state,
            devices=tuple(
                replace(
                    each,
                    sharing=SharingLaw(float(rng.uniform(0, 0.02))),
                    time=AffineLaw(float(rng.uniform(0.005, 0.05)), 0.002, 1e-3, 3e-3),
                )
                for each in state.devices
            ),
        )
        for state in request.clusters
    )
    return replace(request, clusters=tuple(clusters))


@contextmanager
def searched_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    searched, real = list[int](), fronts

    def counting(request: RoundRequest, *args: Any) -> tuple[Front, ...]:
        searched.extend(each.unit for each in request.clusters)
        return real(request, *args)

    with monkeypatch.context() as patch:
        patch.setattr(joint_round, "fronts", counting)
        yield searched


def plan(strategy: Dssra, request: RoundRequest) -> RoundPlan:
    return strategy.plan_round(request, np.random.default_rng(0))


def both(
    monkeypatch: pytest.MonkeyPatch, strategy: Dssra, request: RoundRequest
) -> tuple[RoundPlan, RoundPlan, list[int]]:
    """Return the round's plan, the plan with all units searched, and the units searched for the
    first."""
    with searched_units(monkeypatch) as searched:
        found = plan(strategy, request)
    with monkeypatch.context() as patch:
        patch.setattr(joint_round, "_bounds_hold", lambda request: False)
        return found, plan(strategy, request), searched


@pytest.mark.parametrize("uplink", ["streamed", "after"])
@pytest.mark.parametrize("latency", LATENCIES)
def test_a_round_is_as_good_as_if_all_units_were_searched(
    monkeypatch: pytest.MonkeyPatch, latency: str, uplink: str
) -> None:
    strategy, units, few = Dssra(latency=latency, uplink=uplink), 0, 0
    for seed in range(cases(few=2, many=20)):
        request = with_sharing(["paper", "edge"][seed % 2], seed)
        found, best, searched = both(monkeypatch, strategy, request)
        assert found.certificate and best.certificate
        assert found.certificate.objective == pytest.approx(best.certificate.objective, rel=1e-9)
        assert found.certificate.gap == pytest.approx(best.certificate.gap, abs=1e-9)
        units, few = units + len(request.clusters), few + len(searched)
    assert few < units / 2


@pytest.mark.parametrize("max_nodes", [0, 3])
def test_short_searches_of_few_units_are_nearly_as_good_as_of_all(
    monkeypatch: pytest.MonkeyPatch, max_nodes: int
) -> None:
    """The objective may be worse by the weight of 1 % of the round's time. Queues are most of the
    objective."""
    strategy, fewer = Dssra(max_nodes=max_nodes), 0
    for seed in range(cases(few=4, many=40)):
        request = with_sharing("paper", seed)
        found, best, searched = both(monkeypatch, strategy, request)
        assert found.certificate and best.certificate
        time_s = max(each.uplink.finish_s for each in found.clusters if each.uplink)
        small = 0.01 * strategy.drift_weight * time_s
        assert found.certificate.objective <= best.certificate.objective + small
        fewer += len(searched) < len(request.clusters)
    assert fewer or not max_nodes


def test_a_unit_is_scheduled_by_its_known_plan_and_not_by_its_bound() -> None:
    """Unit 1's bound is below the time of unit 2's plan, but the plan found for unit 1 is
    slower."""
    request, rng = drawn_request("paper", 1), np.random.default_rng(0)
    cluster = request.clusters[0]
    assert cluster.uplink
    uplink = replace(
        cluster.uplink,
        gains=cluster.uplink.gains[:1],
        max_power_w=1e3,
        energy_j=1e9,
        model_bits=1e5,
        activation_bits=1e5,
    )
    usual = replace(cluster.devices[0], max_blocks=None, memory=None, energy=None)
    many = tuple(
        replace(usual, name=f"device-{k}", time=AffineLaw(u, 2e-3, 1e-3, 3e-3), sharing=law)
        for k, u in enumerate(rng.uniform(0.005, 0.05, 20).tolist())
        for law in (SharingLaw(float(rng.uniform(0, 0.02))),)
    )
    fast = replace(usual, time=AffineLaw(0.0012, 2e-3, 1e-3, 3e-3), sharing=None)
    clusters = tuple(
        ClusterState(unit, devices, 10, uplink) for unit, devices in ((1, many), (2, (fast,)))
    )
    request = replace(
        request,
        clusters=clusters,
        num_micro_batches=8,
        channels=request.channels[:1],
        queues=(20.0, 20.0),
        losses=(1.0, 1.0),
    )
    assert [each.unit for each in plan(Dssra(), request).clusters] == [2]


def test_limits_that_a_framework_ignores_exclude_no_unit() -> None:
    """As a framework's rule, ``exact`` exceeds the limits of devices that are too small."""
    request = replace(with_sharing("paper", 1), partition="exact")
    usual, *others = request.clusters
    small = (
        replace(
            state,
            devices=tuple(
                replace(each, max_blocks=1, sharing=SharingLaw(0.01, 1)) for each in state.devices
            ),
        )
        for state in others
    )
    found = plan(Dssra(), replace(request, clusters=(usual, *small)))
    assert len(found.clusters) == len(plan(Dssra(), request).clusters)
    assert any(each.over_limits for each in found.clusters)


def test_a_unit_with_a_bound_but_no_plan_takes_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other units are planned, and not all of them are searched."""
    request, lost, searched = with_sharing("paper", 1), list[int](), list[int]()

    def found(request: RoundRequest, *args: Any) -> tuple[Front, ...]:
        units = [each.unit for each in request.clusters]
        lost.extend(units if not lost else [])
        searched.extend(units)
        if {*units} <= {*lost}:
            raise InfeasibleRoundError("none")
        return fronts(request, *args)

    monkeypatch.setattr(joint_round, "fronts", found)
    planned = plan(Dssra(), request)
    assert {each.unit for each in planned.clusters}.isdisjoint(lost)
    assert len(searched) < len(request.clusters)


def test_all_units_are_searched_if_a_gap_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose bound is higher than another unit's may still be better than the other's known
    plan."""
    request = with_sharing("paper", 1)
    with searched_units(monkeypatch) as searched:
        found = plan(Dssra(max_nodes=0), request)
    assert found.certificate and found.certificate.gap > 0
    assert {each.unit for each in request.clusters} <= set(searched)


@pytest.mark.parametrize("draw", [drawn, tight])
@pytest.mark.parametrize("links", chosen([False, True], [True]))
def test_no_plan_is_faster_than_the_bound_of_its_cluster(
    draw: Callable[[np.random.Generator], ClusterProblem], links: bool
) -> None:
    """Devices may share stages, recompute and have links. If the bound is infinite, no plan
    exists."""
    near = 0
    for seed in range(cases(few=25, many=2000)):
        rng = np.random.default_rng((9, seed))
        problem = linked(draw(rng), rng) if links else draw(rng)
        bound_s = least_batch_s(problem)
        try:
            best = solve_verified(problem, shared_partition, np.random.default_rng(0)).best
        except InfeasibleRoundError:
            continue
        least_s = batch_s(best, problem.activation_s[0])
        assert bound_s <= least_s * (1 + 1e-9)
        near += bound_s > 0.5 * least_s
    assert near


def test_bounds_cover_all_local_steps_and_each_place_of_the_head() -> None:
    request = with_sharing("paper", 1)
    strategy, rng = Dssra(), np.random.default_rng(0)
    every = fronts(request, "overlap", shared_partition, rng, strategy)
    for cluster, front in zip(request.clusters, every, strict=True):
        points = bound_points(request, cluster, "overlap")
        assert bool(points) == bool(front)
        for point in points:
            own = min(each.latency_s for each in front if each.head == point.head)
            assert 0.7 * own < point.bound_s <= own and math.isinf(point.latency_s)
    assert request.local_steps > 1
