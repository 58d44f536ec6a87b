"""Units chosen by a rule get the channels and powers with which the round ends earliest."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import RoundPlan
from optim.baselines import (
    AllUnits,
    EvenSplit,
    HighestLoss,
    RandomUnits,
    SelectUnits,
    ShortestDelay,
)
from optim.cluster.problem import cluster_problem
from optim.partition.exact import exact_partition
from optim.planner import Planner, RoundRequest
from optim.round.channel import links, power_limits
from optim.verify import verify_plan
from tests.optim.drawn_requests import drawn_request
from tests.thorough import cases

Finish = Callable[[int, int], float]
RULES: tuple[Planner, ...] = (RandomUnits(3), HighestLoss(3), ShortestDelay(3))


def plan(strategy: Planner, request: RoundRequest) -> RoundPlan:
    planned = strategy.plan_round(request, np.random.default_rng(0))
    verify_plan(planned, request)
    return planned


def units(planned: RoundPlan) -> list[int]:
    return [cluster.unit for cluster in planned.clusters]


def makespan(planned: RoundPlan) -> float:
    return max(each.uplink.finish_s for each in planned.clusters)


def least_makespan(finish_s: Finish, chosen: list[int], num_channels: int) -> float:
    """Return the least makespan over all assignments of channels to the chosen units."""
    return min(
        max(finish_s(*pair) for pair in zip(chosen, channels, strict=True))
        for channels in itertools.permutations(range(num_channels), len(chosen))
    )


def rich(request: RoundRequest, factor: float) -> RoundRequest:
    """Return the request with ``factor`` times the energy, which pays for all uploads at some
    power."""
    clusters = (
        replace(state, uplink=replace(state.uplink, energy_j=factor * state.uplink.energy_j))
        for state in request.clusters
    )
    return replace(request, clusters=tuple(clusters))


def finish_times(request: RoundRequest, fading: str, uplink: str, energy: str) -> Finish:
    """Return a function of the finish time of a unit on a channel.

    The unit sends with all power that it can pay for, and its split is the best one for this
    channel.
    """
    uplinks = [state.uplink for state in request.clusters]
    pairs = links(uplinks, request.channels, fading, energy).at(0)
    activations, models = pairs.parts(power_limits(pairs))
    steps = request.local_steps

    @functools.cache
    def finish_s(unit: int, channel: int) -> float:
        place = unit // 10 - 1
        activation_s, model_s = activations[place, channel].item(), models[place, channel].item()
        streamed_s = activation_s if uplink == "streamed" else 0.0
        problem = cluster_problem(request, request.clusters[place], "overlap", (streamed_s,))
        batch_s = exact_partition(problem).certificate.objective
        return steps * batch_s + activation_s - streamed_s + model_s

    return finish_s


@pytest.mark.parametrize("uplink", ["streamed", "after"])
@pytest.mark.parametrize("fading", [pytest.param("none", marks=pytest.mark.thorough), "rayleigh"])
@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_the_chosen_units_finish_as_early_as_any_channels_allow(
    preset: str, fading: str, uplink: str
) -> None:
    energy = "all" if uplink == "streamed" else "adapters"
    for seed in range(cases(2, 3)):
        request = rich(drawn_request(preset, seed), 5.0)
        finish_s = finish_times(request, fading, uplink, energy)
        for rule in RULES:
            planned = plan(replace(rule, fading=fading, uplink=uplink, energy=energy), request)
            assert units(planned) == units(plan(rule, replace(request, channels=())))
            best = least_makespan(finish_s, units(planned), len(request.channels))
            assert makespan(planned) == pytest.approx(best, rel=1e-9)
            assert planned.queues == planned.gammas == ()


@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_units_without_channels_are_split_as_if_there_were_no_channels(preset: str) -> None:
    """There are more units than channels, so no upload overlaps with a pipeline."""
    for seed in range(2):
        request = drawn_request(preset, seed, num_units=7)
        planned = plan(AllUnits(), request)
        assert len(planned.clusters) > len(request.channels)
        assert planned.clusters == plan(AllUnits(), replace(request, channels=())).clusters


@pytest.mark.parametrize("preset", ["paper", "edge"])
def test_shortest_delay_ignores_uploads(preset: str) -> None:
    """The unit with the fastest pipeline is chosen even if it uploads 1e11 bits."""
    for seed in range(2):
        request = drawn_request(preset, seed)
        delays = {
            each.unit: each.latency_s
            for each in plan(AllUnits(), replace(request, channels=())).clusters
        }
        fastest = min(delays, key=delays.__getitem__)
        clusters = tuple(
            replace(state, uplink=replace(state.uplink, activation_bits=1e11, energy_j=1e9))
            if state.unit == fastest
            else state
            for state in request.clusters
        )
        assert units(plan(ShortestDelay(1), replace(request, clusters=clusters))) == [fastest]


@pytest.mark.parametrize("rule", [RandomUnits, HighestLoss, ShortestDelay])
def test_at_most_one_unit_per_channel_is_chosen(rule: type[SelectUnits]) -> None:
    """The rule chooses the units; the channels only limit their number."""
    for seed in range(4):
        request = drawn_request("paper", seed)
        two = replace(request, channels=request.channels[:2], clusters=with_first_gains(request, 2))
        assert units(plan(rule(5), two)) == units(plan(rule(2), two))


def with_first_gains(request: RoundRequest, channels: int) -> tuple:
    return tuple(
        replace(state, uplink=replace(state.uplink, gains=state.uplink.gains[:channels]))
        for state in request.clusters
    )


def test_a_unit_that_cannot_pay_for_its_upload_is_left_out() -> None:
    request = drawn_request("edge", 0)
    first, *_ = units(plan(ShortestDelay(1), request))

    def poor(*poor_units: int) -> RoundRequest:
        clusters = (
            replace(state, uplink=replace(state.uplink, energy_j=0.0))
            if state.unit in poor_units
            else state
            for state in request.clusters
        )
        return replace(request, clusters=tuple(clusters))

    chosen = units(plan(ShortestDelay(3), request))
    assert units(plan(ShortestDelay(3), poor(first))) == [u for u in chosen if u != first]
    with pytest.raises(InfeasibleRoundError, match=r"can afford its upload \(C8\)"):
        plan(ShortestDelay(1), poor(first))


def test_no_uplinks_are_planned_if_no_unit_reports_one() -> None:
    request = drawn_request("edge", 0)
    silent = tuple(replace(state, uplink=None) for state in request.clusters)
    for rule in RULES:
        planned = plan(rule, replace(request, clusters=silent))
        assert [each.uplink for each in planned.clusters] == [None] * 3


def test_all_units_get_a_channel_if_there_are_enough() -> None:
    request = drawn_request("paper", 0)
    present = units(plan(AllUnits(), request))
    assert len(present) > len(request.channels)
    assert {each.uplink for each in plan(AllUnits(), request).clusters} == {None}
    few = replace(
        request, clusters=tuple(s for s in request.clusters if s.unit in (*present[:4], 60))
    )
    planned = plan(AllUnits(), few)
    assert units(planned) == present[:4]
    assert {each.uplink.channel for each in planned.clusters} == {0, 1, 2, 3}
    assert {each.uplink for each in plan(EvenSplit(), few).clusters} == {None}


def test_random_units_do_not_depend_on_the_partition() -> None:
    """This allows paired comparisons of partitions."""
    for seed in range(10):
        request, chosen = drawn_request("edge", seed), set()
        for partition in (None, "vanilla_fl", "no_segment_scheduling", "pipeline"):
            rng = np.random.default_rng(seed)
            planned = RandomUnits(2).plan_round(replace(request, partition=partition), rng)
            chosen.add(tuple(units(planned)))
        assert len(chosen) == 1
