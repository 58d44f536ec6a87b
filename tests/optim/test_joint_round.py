"""A round for which few units' shared stages are searched is as good as if all were searched."""

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
from optim.cluster_plan import Front, bound_points, fronts
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
    """A drawn round in which all devices may share stages, each of its own speed."""
    asked, rng = drawn_request(preset, seed, num_units), np.random.default_rng(seed)
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
        for state in asked.clusters
    )
    return replace(asked, clusters=tuple(clusters))


@contextmanager
def searched_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    searched, real = list[int](), fronts

    def counting(request: RoundRequest, *args: Any) -> tuple[Front, ...]:
        searched.extend(each.unit for each in request.clusters)
        return real(request, *args)

    with monkeypatch.context() as patch:
        patch.setattr(joint_round, "fronts", counting)
        yield searched


def plan(strategy: Dssra, asked: RoundRequest) -> RoundPlan:
    return strategy.plan_round(asked, np.random.default_rng(0))


def both(
    monkeypatch: pytest.MonkeyPatch, strategy: Dssra, asked: RoundRequest
) -> tuple[RoundPlan, RoundPlan, list[int]]:
    """The round's plan, that with all units searched, and the units searched for the former."""
    with searched_units(monkeypatch) as searched:
        found = plan(strategy, asked)
    with monkeypatch.context() as patch:
        patch.setattr(joint_round, "_bounds_hold", lambda request: False)
        return found, plan(strategy, asked), searched


@pytest.mark.parametrize("uplink", ["streamed", "after"])
@pytest.mark.parametrize("latency", LATENCIES)
def test_a_round_is_as_good_as_if_all_units_were_searched(
    monkeypatch: pytest.MonkeyPatch, latency: str, uplink: str
) -> None:
    strategy, units, few = Dssra(latency=latency, uplink=uplink), 0, 0
    for seed in range(cases(few=2, many=20)):
        asked = with_sharing(["paper", "edge"][seed % 2], seed)
        found, best, searched = both(monkeypatch, strategy, asked)
        assert found.certificate and best.certificate
        assert found.certificate.objective == pytest.approx(best.certificate.objective, rel=1e-9)
        assert found.certificate.gap == pytest.approx(best.certificate.gap, abs=1e-9)
        units, few = units + len(asked.clusters), few + len(searched)
    assert few < units / 2


@pytest.mark.parametrize("max_nodes", [0, 3])
def test_what_short_searches_leave_open_costs_no_more_than_if_all_units_were_searched(
    monkeypatch: pytest.MonkeyPatch, max_nodes: int
) -> None:
    """Up to a hundredth of the round's time, and not of its objective, most of which are queues."""
    strategy, fewer = Dssra(max_nodes=max_nodes), 0
    for seed in range(cases(few=4, many=40)):
        asked = with_sharing("paper", seed)
        found, best, searched = both(monkeypatch, strategy, asked)
        assert found.certificate and best.certificate
        time_s = max(each.uplink.finish_s for each in found.clusters if each.uplink)
        small = 0.01 * strategy.drift_weight * time_s
        assert found.certificate.objective <= best.certificate.objective + small
        fewer += len(searched) < len(asked.clusters)
    assert fewer or not max_nodes


def test_a_unit_that_may_be_faster_than_an_unfinished_search_is_searched() -> None:
    """The first unit's bound is below the second one's plan, and the plan found for it is not."""
    asked, rng = drawn_request("paper", 1), np.random.default_rng(0)
    cluster = asked.clusters[0]
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
    asked = replace(
        asked,
        clusters=clusters,
        num_micro_batches=8,
        channels=asked.channels[:1],
        queues=(20.0, 20.0),
        losses=(1.0, 1.0),
    )
    assert [each.unit for each in plan(Dssra(), asked).clusters] == [2]


def test_limits_that_a_framework_ignores_drop_no_unit() -> None:
    """``exact`` as a framework's rule plans over the limits of devices that are too small."""
    asked = replace(with_sharing("paper", 1), partition="exact")
    usual, *others = asked.clusters
    small = (
        replace(
            state,
            devices=tuple(
                replace(each, max_blocks=1, sharing=SharingLaw(0.01, 1)) for each in state.devices
            ),
        )
        for state in others
    )
    found = plan(Dssra(), replace(asked, clusters=(usual, *small)))
    assert len(found.clusters) == len(plan(Dssra(), asked).clusters)
    assert any(each.over_limits for each in found.clusters)


def test_a_unit_without_a_plan_though_it_has_a_bound_takes_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are planned, and no more of them are searched for it."""
    asked, lost, searched = with_sharing("paper", 1), list[int](), list[int]()

    def found(request: RoundRequest, *args: Any) -> tuple[Front, ...]:
        units = [each.unit for each in request.clusters]
        lost.extend(units if not lost else [])
        searched.extend(units)
        if {*units} <= {*lost}:
            raise InfeasibleRoundError("none")
        return fronts(request, *args)

    monkeypatch.setattr(joint_round, "fronts", found)
    planned = plan(Dssra(), asked)
    assert {each.unit for each in planned.clusters}.isdisjoint(lost)
    assert len(searched) < len(asked.clusters)


def test_all_units_are_searched_if_a_gap_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is worse than another one's bound may be better than its best known plan."""
    asked = with_sharing("paper", 1)
    with searched_units(monkeypatch) as searched:
        found = plan(Dssra(max_nodes=0), asked)
    assert found.certificate and found.certificate.gap > 0
    assert {each.unit for each in asked.clusters} <= set(searched)


@pytest.mark.parametrize("draw", [drawn, tight])
@pytest.mark.parametrize("links", chosen([False, True], [True]))
def test_no_plan_is_faster_than_the_bound_of_its_cluster(
    draw: Callable[[np.random.Generator], ClusterProblem], links: bool
) -> None:
    """Though devices may share stages or recompute, and have links; an infinite bound has none."""
    near = 0
    for seed in range(cases(few=60, many=2000)):
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


def test_a_point_with_a_bound_counts_all_local_steps_and_each_place_of_the_head() -> None:
    asked = with_sharing("paper", 1)
    strategy, rng = Dssra(), np.random.default_rng(0)
    every = fronts(asked, "overlap", shared_partition, rng, strategy)
    for cluster, front in zip(asked.clusters, every, strict=True):
        points = bound_points(asked, cluster, "overlap")
        assert bool(points) == bool(front)
        for point in points:
            own = min(each.latency_s for each in front if each.head == point.head)
            assert 0.7 * own < point.bound_s <= own and math.isinf(point.latency_s)
    assert asked.local_steps > 1
