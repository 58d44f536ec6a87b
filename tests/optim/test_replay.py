"""A request read back from JSON is equal to the original and gives the same plan."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from optim.baselines import AllUnits, EvenSplit, HighestLoss, RandomUnits, ShortestDelay
from optim.dssra import Dssra
from optim.planner import Planner, RoundRequest
from optim.verify import verify_plan
from tests.optim.drawn_requests import drawn_request

REQUEST = TypeAdapter(RoundRequest)
STRATEGIES: dict[str, Planner] = {
    "dssra": Dssra(),
    "dssra_paper": Dssra(solver="paper"),
    "even": EvenSplit(),
    "all": AllUnits(),
    "random": RandomUnits(2),
    "loss_only": HighestLoss(2, partition="pipeline"),
    "delay_only": ShortestDelay(2, fading="rayleigh"),
}


@pytest.mark.parametrize("preset", ["paper", "edge"])
@pytest.mark.parametrize("seed", range(5))
def test_a_request_read_from_json_is_equal_to_the_original(preset: str, seed: int) -> None:
    request = replace(drawn_request(preset, seed), partition="titanic" if seed % 2 else None)
    assert REQUEST.validate_json(REQUEST.dump_json(request)) == request


@pytest.mark.parametrize("preset", [pytest.param("paper", marks=pytest.mark.thorough), "edge"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replayed_request_gives_the_same_plan(strategy: str, preset: str) -> None:
    """A framework prescribes the partition or not. Each plan satisfies all constraints."""
    planner = STRATEGIES[strategy]
    for partition in (None, "no_segment_scheduling", "vanilla_fl"):
        request = replace(drawn_request(preset, 3), partition=partition)
        again = REQUEST.validate_json(REQUEST.dump_json(request))
        plans = [planner.plan_round(each, np.random.default_rng(7)) for each in (request, again)]
        assert plans[0] == plans[1]
        assert plans[0].clusters
        verify_plan(plans[0], request)
