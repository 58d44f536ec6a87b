"""Runs planned by DSSRA: they train as planned and record their plans."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from federated import run, weights
from run_files import rounds_of, summary_of

from collapipe.errors import InfeasibleRoundError, PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan, SegmentPlan, Span
from optim.planner import RoundRequest

PLANNED = (
    "strategy=dssra",
    "cluster=uneven",
    "cluster.num_devices=4",
    "channel.num_channels=2",
    "federation.num_units=4",
    "federation.rounds=4",
    "federation.local_steps=1",
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and its standard output."""
    folder = tmp_path_factory.mktemp("planned")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(folder, *PLANNED)
    return folder, out.getvalue()


def test_two_of_four_uneven_clusters_train_as_planned(planned: tuple[Path, str]) -> None:
    folder, printed = planned
    lines, queues = rounds_of(folder), [0.0] * 4
    for line in lines:
        plan = line["plan"]
        assert line["units"] == [cluster["unit"] for cluster in plan["clusters"]]
        assert len(line["units"]) == 2
        expected = [max(y + g - 0.84, 0) for y, g in zip(queues, plan["gammas"], strict=True)]
        assert plan["queues"] == pytest.approx(expected)
        queues = plan["queues"]
        assert plan["certificate"]["objective"] == pytest.approx(plan["certificate"]["lower_bound"])
    assert {unit for line in lines for unit in line["units"]} == {0, 1, 2, 3}
    cuts = {
        tuple((segment["device"], segment["span"]["blocks"]) for segment in cluster["segments"])
        for line in lines
        for cluster in line["plan"]["clusters"]
    }
    assert len(cuts) > 1  # the clusters have different devices
    assert max(map(len, cuts)) > 1
    table = printed.split("run ")[-1]
    for unit in range(4):
        assert f"unit {unit}" in table
    assert "; m=" in table


def test_the_same_seed_plans_and_trains_the_same(tmp_path: Path, planned: tuple[Path, str]) -> None:
    first, second = weights(planned[0]), run(tmp_path, *PLANNED)
    assert all(first[name].equal(second[name]) for name in first)
    plans = [
        [{**line["plan"], "certificate": None} for line in rounds_of(folder)]
        for folder in (planned[0], tmp_path)
    ]
    assert plans[0] == plans[1]


def test_an_infeasible_round_stops_the_run_with_the_planners_error(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleRoundError, match=r"^round 1: "):
        run(tmp_path, *PLANNED, "channel.energy_j=1.0e-9")
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert "energy" in summary["error"]
    assert "\n" not in summary["error"]


SMALL = (
    "cluster=edge",
    "cluster.kinds=[{name: x, flops_per_s: 1e9, memory_bytes: 1e3, power_w: 5, d2d_rate_bps: 1e8}]",
)


@dataclass(frozen=True)
class Greedy:
    """A strategy that gives all blocks to a cluster's first device and ignores its memory."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        span, m = Span(0, request.num_blocks), request.num_micro_batches
        plans = (
            ClusterPlan(each.unit, (SegmentPlan(each.devices[0].name, span),), m, request.schedule)
            for each in request.clusters
        )
        return RoundPlan(request.round, tuple(plans))


def test_a_plan_that_exceeds_a_devices_memory_is_refused(tmp_path: Path) -> None:
    expected = r"unit 0: C7: x-0 holds 4 blocks, which with m=2 take \d+ bytes of 1000"
    with pytest.raises(PlanViolationError, match=expected):
        run(tmp_path, "strategy=even", "strategy._target_=test_planned_run.Greedy", *SMALL)


def test_an_even_split_that_fits_no_device_is_infeasible(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleRoundError, match=r"unit 0: .* at most 0 fit its memory; raise"):
        run(tmp_path, "strategy=even", *SMALL)
