"""``optim`` as a library: the documented example runs without torch and Flower."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import optim
from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import RoundPlan, SegmentPlan, Span
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, Link, Uplink
from optim import ClusterProblem, Dssra, exact_partition, plan_cluster, plan_round
from optim.planner import RoundRequest
from optim.problem import UplinkTimes

FAST, SLOW = AffineLaw(u=0.02, v=0.01, w=0.0, ell=0.05), AffineLaw(u=0.08, v=0.01, w=0.0, ell=0.05)
DEVICES = DeviceProfile("jetson", FAST, max_blocks=8), DeviceProfile("pi", SLOW, max_blocks=6)
ROOT = Path(__file__).parents[2]
WITHOUT = "import sys\nsys.modules |= dict.fromkeys(('torch', 'flwr', 'hydra', 'datasets'))\n"


def run(source: str) -> str:
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_example_runs_without_torch_and_prints_the_pages_output() -> None:
    page = (ROOT / "docs/how-to/planner-library.md").read_text()
    sources = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    code = [line for source in sources for line in source.splitlines()]
    printed = run(WITHOUT + "".join(sources)).splitlines()
    assert printed == [line for line in shown if f"    {line}" not in code]


def test_importing_optim_does_not_load_numpy_and_scipy() -> None:
    loaded = run("import sys, optim; print(sorted(sys.modules))")
    assert "'numpy'" not in loaded
    assert "'scipy'" not in loaded


@pytest.mark.parametrize("name", optim.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(optim, name).__name__ == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'nosuch'"):
        optim.nosuch  # noqa: B018


def test_a_cluster_is_planned_with_names_and_a_certificate() -> None:
    plan = plan_cluster(DEVICES, num_blocks=12, batch_size=16)
    solution = exact_partition(ClusterProblem(DEVICES, 12, 16, 16, "overlap"))
    assert plan.segments == (SegmentPlan("jetson", Span(0, 8)), SegmentPlan("pi", Span(8, 4)))
    assert (plan.num_micro_batches, plan.certificate) == (8, solution.certificate)
    assert (plan.latency_s, plan.front) == (solution.best.latency_s, solution.front)
    assert [point.fastest_s for point in plan.front] == [UplinkTimes(first_s=0.0)]


def test_a_cluster_is_planned_by_any_solver_and_with_fewer_micro_batches() -> None:
    even = plan_cluster(DEVICES, num_blocks=12, batch_size=16, max_micro_batches=3, solver="gpipe")
    assert [each.span.blocks for each in even.segments] == [6, 6]
    assert even.num_micro_batches <= 3
    assert (even.certificate.solver, even.certificate.lower_bound) == ("gpipe", 0.0)
    few = plan_cluster(DEVICES, num_blocks=6, batch_size=4, latency="bound", solver="vanilla_fl")
    assert few.segments == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": ()}, r"^devices=0: must be a whole number from 1 on$"),
        ({"devices": (*DEVICES, DEVICES[0])}, "^devices: jetson is there twice$"),
        (
            {"devices": (replace(DEVICES[0], links=(Link("pie", 0.0, 5.0),)), DEVICES[1])},
            "^device jetson: has a link to 'pie', which is no device of the cluster; nearest: pi$",
        ),
        ({"devices": DEVICES[0]}, r"^devices=DeviceProfile.*: must be a list of objects of Dev"),
        (
            {"devices": iter(DEVICES)},
            r"^devices=<tuple_iterator .*>: must be a list of objects of ",
        ),
        ({"devices": (DEVICES[0], {})}, r"^devices=\{\}: must be an object of DeviceProfile$"),
        ({"num_blocks": 3.5}, r"^num_blocks=3\.5: must be a whole number"),
        ({"num_blocks": 12.0}, r"^num_blocks=12\.0: "),
        ({"num_blocks": math.nan}, "^num_blocks=nan: "),
        ({"num_blocks": "3"}, "^num_blocks=3: "),
        ({"num_blocks": True}, "^num_blocks=True: "),
        ({"num_blocks": np.uint8(12)}, "^num_blocks=12: "),
        ({"num_blocks": 0}, "^num_blocks=0: "),
        ({"batch_size": 0}, "^batch_size=0: "),
        ({"max_micro_batches": 0}, "^max_micro_batches=0: "),
        ({"seed": "a"}, "^seed=a: must be a whole number from 0 on$"),
        ({"latency": "sum"}, "^latency=sum: must be one of bound"),
        ({"schedule": "x"}, "^schedule=x: must be one of gpipe, one_f_one_b$"),
        ({"schedule": "auto"}, "^schedule=auto: must be one of gpipe, one_f_one_b$"),
        ({"solver": "best"}, "^solver best: must be one of exact"),
    ],
)
def test_an_impossible_cluster_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"devices": DEVICES, "num_blocks": 12, "batch_size": 16, **changes}
    with pytest.raises(ConfigError, match=message):
        plan_cluster(**arguments)


def test_numpys_whole_numbers_are_sizes() -> None:
    assert plan_cluster(DEVICES, num_blocks=np.int64(12), batch_size=16).segments


def test_numpys_narrow_numbers_are_planned_with_as_pythons() -> None:
    """In float32 the verifier would find other times than the solver."""
    times = 0.083, 0.0171, 0.0031, 0.0467
    law = AffineLaw(*map(np.float32, times))
    assert law == AffineLaw(*(float(np.float32(each)) for each in times))
    for state in (
        law,
        Channel(*map(np.float32, (5e5, 0.07, 4e-21))),
        Uplink(*map(np.float16, (0.5, 9, 8, 8)), gains=np.array([0.9], np.float32)),
    ):
        figures = [getattr(state, each.name) for each in fields(state)]
        assert {type(each) for each in figures} <= {float, int, tuple}
    plan = plan_cluster([DeviceProfile("a", law)], num_blocks=12, batch_size=16)
    assert type(plan.latency_s) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency": "overlaps"}, "^latency=overlaps: must be one of"),
        ({"num_blocks": -1}, "^num_blocks=-1: must be a whole number from 1 on"),
        ({"num_blocks": math.nan}, "^num_blocks=nan: must be"),
        ({"batch_size": math.nan}, "^batch_size=nan: must be"),
        ({"min_micro_batches": 17}, "^micro-batches from 17 to 16: must be"),
        ({"min_micro_batches": 0}, "^micro-batches from 0 to 16: "),
        ({"activation_s": ()}, "^activation_s="),
        ({"activation_s": (math.nan,)}, "^activation_s="),
        ({"activation_s": (2.0, 1.0)}, "^activation_s="),
        ({"activation_s": (-1.0,)}, "^activation_s="),
    ],
)
def test_an_impossible_problem_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ClusterProblem(DEVICES, 12, 16, 16, "overlap"), **changes)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasibleRoundError, match="at most 14 of 20 blocks"):
        plan_cluster(DEVICES, num_blocks=20, batch_size=16)


UPLINK = Uplink(
    max_power_w=0.5, energy_j=100.0, model_bits=2e6, activation_bits=1e6, gains=(0.9, 0.8)
)
CLUSTERS = [ClusterState(unit, DEVICES, 100, UPLINK) for unit in range(3)]
CHANNELS = [Channel(5e5, 0.07, 4e-21), Channel(4e5, 0.06, 4e-21)]
SIZES = {"num_blocks": 12, "batch_size": 8}


def test_a_unit_that_was_left_out_takes_part_in_the_next_round() -> None:
    first = plan_round(CLUSTERS, CHANNELS, **SIZES)
    second = plan_round(CLUSTERS, CHANNELS, **SIZES, previous=first)
    assert (first.round, second.round) == (1, 2)
    (left_out,) = {0, 1, 2} - {each.unit for each in first.clusters}
    assert left_out in {each.unit for each in second.clusters}


class Recorder:
    """A strategy that schedules no unit, and records its requests and one random number per
    round."""

    def __init__(self) -> None:
        self.requests, self.draws = list[RoundRequest](), set[float]()

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        self.requests.append(request)
        self.draws.add(rng.random())
        return RoundPlan(request.round, (), queues=(1.0, 2.0, 3.0), error_queues=(0.5, 0.0, 1.5))


def test_the_round_number_and_both_queues_continue() -> None:
    strategy, plan = Recorder(), None
    for _ in range(3):
        plan = plan_round(CLUSTERS, CHANNELS, **SIZES, strategy=strategy, previous=plan)
    first, second, third = strategy.requests
    assert (first.round, first.queues, first.error_queues) == (1, (0.0, 0.0, 0.0), ())
    assert (second.round, second.queues) == (2, (1.0, 2.0, 3.0))
    assert second.error_queues == (0.5, 0.0, 1.5)
    assert third.round == 3
    assert len(strategy.draws) == 3


@pytest.mark.parametrize("name", ["queues", "error_queues"])
def test_a_previous_plan_with_impossible_queues_is_refused(name: str) -> None:
    last = RoundPlan(4, (), **{name: (0.0, 0.0)})
    with pytest.raises(ConfigError, match=f"^previous: has 2 {name}, expected 3$"):
        plan_round(CLUSTERS, CHANNELS, **SIZES, previous=last)
    for queue in (math.nan, math.inf, -1.0):
        last = RoundPlan(4, (), **{name: (0.0, queue, 0.0)})
        with pytest.raises(ConfigError, match=f"^previous: {name} must be finite"):
            plan_round(CLUSTERS, CHANNELS, **SIZES, previous=last)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": ()}, "^clusters=0: must be a whole number from 1 on$"),
        ({"channels": ()}, "^channels=0: must be a whole number from 1 on$"),
        ({"clusters": None}, "^clusters=None: must be a list of objects of ClusterState$"),
        ({"channels": iter(CHANNELS)}, "^channels=<list.*>: must be a list of objects of Channel$"),
        ({"clusters": (*CLUSTERS[:2], {})}, r"^clusters=\{\}: must be an object of ClusterState$"),
        ({"channels": (CHANNELS[0], {})}, r"^channels=\{\}: must be an object of Channel$"),
        ({"clusters": (*CLUSTERS[:2], CLUSTERS[0])}, "^clusters: 0 is there twice$"),
        ({"batch_size": 0}, "^batch_size=0: "),
        ({"schedule": "x"}, "^schedule=x: must be one of auto, gpipe, one_f_one_b$"),
        ({"local_steps": 0.5}, r"^local_steps=0\.5: "),
        ({"strategy": Dssra}, "^strategy=<class .*Dssra'>: must be an object such as"),
        ({"strategy": "dssra"}, "^strategy=dssra: must be an object such as"),
        ({"previous": 3}, "^previous=3: must be the plan of the last round$"),
        ({"seed": "a"}, "^seed=a: must be a whole number from 0 on$"),
        ({"seed": -1}, "^seed=-1: must be a whole number from 0 on$"),
    ],
)
def test_an_impossible_round_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"clusters": CLUSTERS, "channels": CHANNELS, **SIZES, **changes}
    with pytest.raises(ConfigError, match=message):
        plan_round(**arguments)


@dataclass(frozen=True)
class Answering:
    """A strategy that returns this in place of its plan."""

    answer: Callable[[RoundRequest], object]

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        return cast(RoundPlan, self.answer(request))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, " returned NoneType, expected RoundPlan"),
        ([], " returned list, expected RoundPlan"),
        (RoundPlan(1, (None,)), r": clusters\[0\]: must be keys with values"),
        (
            RoundPlan(1, (), queues=(np.float64(-1),) * 3),
            r": queues\[0\]: must be at least 0, not -1.0",
        ),
    ],
)
def test_a_strategy_that_returns_no_valid_plan_is_refused(answer: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^strategy: Answering.plan_round{message}$"):
        plan_round(CLUSTERS, CHANNELS, **SIZES, strategy=Answering(lambda _: answer))


def test_a_strategy_may_not_change_the_request_that_verifies_its_plan() -> None:
    """A slow device of two blocks would get more of them."""
    device = replace(DEVICES[0], max_blocks=2)

    def change(request: RoundRequest) -> object:
        object.__setattr__(request.clusters[0].devices[0], "max_blocks", 6)
        raise InfeasibleRoundError("a strategy may also change and skip it")

    clusters = [replace(CLUSTERS[0], devices=(device, DEVICES[1]))]
    with pytest.raises(ConfigError, match=r"^strategy: Answering\.plan_round: changed its request"):
        plan_round(clusters, CHANNELS, **SIZES, strategy=Answering(change))


@pytest.mark.parametrize(
    "figures",
    [
        (0, 1, 1),
        (None, 1, 1),
        ("1", 1, 1),
        (math.nan, 1, 1),
        (1, -1, 1),
        (1, 1, math.inf),
        (1, 0, 0),
    ],
)
def test_an_impossible_channel_is_refused(figures: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="bandwidth_hz above 0"):
        Channel(*figures)
