"""Strategies choose precisions in every round, plans name them, and costs count them."""

from dataclasses import replace

import numpy as np
import pytest

from collapipe.errors import ConfigError, InfeasibleRoundError, PlanViolationError
from collapipe.plan import RoundPlan
from collapipe.state import Payload
from optim.baselines import AllUnits
from optim.cost import round_cost
from optim.dssra import Dssra
from optim.planner import RoundRequest
from optim.verify import verify_plan
from tests.optim.drawn_requests import drawn_request
from tests.thorough import cases

SHARES = {"float32": 1.0, "int8": 0.26, "int4": 0.13}
ERRORS = {"float32": 0.0, "int8": 5e-4, "int4": 4e-3}
DRIFTS = pytest.mark.parametrize("drift", ["gamma", "paper"])


def offering(request: RoundRequest, names: tuple[str, ...] = tuple(SHARES)) -> RoundRequest:
    """Return the request of units that may send activations in these precisions."""
    clusters = []
    for state in request.clusters:
        payloads = tuple(
            Payload(
                name,
                "float32",
                state.uplink.model_bits,
                SHARES[name] * state.uplink.activation_bits,
                ERRORS[name],
            )
            for name in names
        )
        clusters.append(replace(state, uplink=replace(state.uplink, payloads=payloads)))
    return replace(request, clusters=tuple(clusters))


def planned(request: RoundRequest, strategy: Dssra | AllUnits) -> RoundPlan:
    plan = strategy.plan_round(request, np.random.default_rng(0))
    verify_plan(plan, request)
    return plan


@DRIFTS
@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_plans_name_the_payload_and_costs_count_it(preset: str, drift: str) -> None:
    sent = set()
    for seed in range(cases(2, 4)):
        request = offering(drawn_request(preset, seed))
        strategy = Dssra(drift=drift, drift_weight=30.0)
        plan = planned(request, strategy)
        cost = round_cost(plan, request, strategy.latency, "none", "streamed")
        for cluster, spent in zip(plan.clusters, cost.clusters, strict=True):
            assert cluster.uplink is not None
            assert cluster.uplink.upload == "float32"
            assert spent.upload_s == pytest.approx(cluster.uplink.upload_s, rel=1e-9)
            assert spent.finish_s == pytest.approx(cluster.uplink.finish_s, rel=1e-9)
            sent.add(cluster.uplink.activation)
        assert len(plan.error_queues) == len(request.clusters)
    assert preset == "edge" or "int4" in sent  # uploads take little time in ``edge``


@DRIFTS
def test_errors_of_many_rounds_stay_within_the_budget(drift: str) -> None:
    """Precisions alternate: after a coarse one, finer ones shorten the error queue."""
    request, strategy = offering(drawn_request("paper", 1)), Dssra(drift=drift, drift_weight=30.0)
    units = {state.unit: place for place, state in enumerate(request.clusters)}
    spent, rounds, sent = np.zeros(len(units)), 40, set()
    for _ in range(rounds):
        plan = planned(request, strategy)
        for cluster in plan.clusters:
            assert cluster.uplink is not None and cluster.uplink.activation is not None
            spent[units[cluster.unit]] += ERRORS[cluster.uplink.activation]
            sent.add(cluster.uplink.activation)
        request = replace(request, queues=plan.queues, error_queues=plan.error_queues)
    assert len(sent) > 1
    assert "int4" in sent
    queued = strategy.error_budget * np.array(request.error_queues)
    assert (spent <= strategy.error_budget * rounds + queued + 1e-12).all()
    assert spent.max() <= 1.5 * strategy.error_budget * rounds


def test_strategies_without_queues_keep_the_budget_in_each_round() -> None:
    for seed in range(4):
        request = offering(drawn_request("paper", seed, num_units=4))
        plan = planned(request, AllUnits())
        names = {each.uplink.activation for each in plan.clusters if each.uplink}
        assert names
        assert names <= {"float32", "int8"}
        assert "int8" in names  # uploads take long in ``paper``


def test_fewer_bits_can_make_a_round_feasible() -> None:
    """Energy pays for all sent bits, and float32 has too many."""
    request = drawn_request("paper", 0)
    clusters = tuple(
        replace(state, uplink=replace(state.uplink, activation_bits=2e8, energy_j=10.0))
        for state in request.clusters
    )
    request = replace(request, clusters=clusters)
    with pytest.raises(InfeasibleRoundError, match=r"\bC8\b"):
        planned(request, Dssra())
    with pytest.raises(InfeasibleRoundError, match=r"\bC8\b"):
        planned(offering(request, ("float32",)), Dssra())
    too_many = tuple(
        replace(state, uplink=replace(state.uplink, energy_j=1.0)) for state in request.clusters
    )
    with pytest.raises(InfeasibleRoundError, match=r"\bC8\b.*fewest bits"):
        planned(offering(replace(request, clusters=too_many)), Dssra())
    plan = planned(offering(request), Dssra())
    assert plan.clusters
    assert all(each.uplink and each.uplink.activation != "float32" for each in plan.clusters)


@pytest.mark.parametrize(("budget", "forbids"), [(1e-2, False), (1e-6, True)])
def test_the_error_does_not_advise_fewer_bits_than_were_offered(
    budget: float, forbids: bool
) -> None:
    """The error names the error budget only if the budget forbids fewer bits."""
    request = drawn_request("paper", 0, num_units=2)
    clusters = tuple(
        replace(state, uplink=replace(state.uplink, activation_bits=2e8, energy_j=2.0))
        for state in request.clusters
    )
    request = replace(request, clusters=clusters)
    with pytest.raises(InfeasibleRoundError, match=r"\bC8\b") as caught:
        planned(offering(request), AllUnits(error_budget=budget))
    assert "such as" not in str(caught.value)
    assert ("error_budget" in str(caught.value)) == forbids


def test_algorithm_3_refuses_a_choice_of_payloads() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.solver=paper.*compression\.activation"):
        planned(offering(drawn_request("paper", 0)), Dssra(solver="paper"))


def test_a_plan_with_a_precision_that_was_not_offered_is_refused() -> None:
    request = offering(drawn_request("edge", 0))
    plan = planned(request, Dssra())
    first, *others = plan.clusters
    forged = replace(first, uplink=replace(first.uplink, activation="int6"))
    with pytest.raises(PlanViolationError, match="int6"):
        verify_plan(replace(plan, clusters=(forged, *others)), request)


@pytest.mark.parametrize("budget", [0.0, 1e-200])
def test_a_budget_that_is_zero_or_too_small_is_refused(budget: float) -> None:
    """The square of an error divided by the budget must be a finite number."""
    for strategy in (Dssra, AllUnits):
        with pytest.raises(ConfigError, match=r"^strategy\.error_budget="):
            strategy(error_budget=budget)
    request = offering(drawn_request("paper", 0))
    assert planned(request, Dssra(error_budget=1e-18)).clusters
