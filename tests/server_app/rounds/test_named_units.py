"""Log lines and errors of a round use the names in units' certificates and owner files."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import settings_of
from sections import privacy_settings

from collapipe.errors import (
    BudgetSpentError,
    InfeasibleRoundError,
    NonFiniteLossError,
    RoundFailedError,
)
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, Uplink
from collapipe.wire.messages import Failure
from server_app.planning.scheduler import Scheduler
from server_app.roster import Roster
from server_app.rounds.global_model import GlobalModel, Updates
from server_app.rounds.private_mean import PrivateMean

MOBILE = (
    "strategy=dssra",
    "environment=mobile",
    "cluster=paper",
    "channel=paper",
    "federation.num_units=4",
    "channel.num_channels=2",
    "channel.energy_j=1.0e3",
    "federation.on_infeasible=skip",
)
TOWNS = ("berlin", "paris", "rome", "")


def cluster(unit: int) -> ClusterState:
    device = DeviceProfile("d", AffineLaw(0.01, 0.01, 0.0, 0.02), max_blocks=4)
    return ClusterState(unit, (device,), 10, Uplink(0.5, 10.0, 1e6, 1e6, (0.9, 0.8)))


def scheduler(tmp_path: Path, *overrides: str) -> Scheduler:
    settings = settings_of(tmp_path / "unused", [*MOBILE, *overrides])
    return Scheduler(settings, TOWNS.__getitem__)


CLUSTERS = [cluster(unit) for unit in range(4)]


def test_a_request_has_the_known_names_and_ignores_reported_ones(tmp_path: Path) -> None:
    own = scheduler(tmp_path)
    state = own.begin([cluster(0), replace(cluster(1), name="mallory"), *CLUSTERS[2:]])
    roster = state.roster
    for round_ in (1, 2):  # unit 2 is suspended in round 3
        roster = roster.after_failures(round_, {2: Failure("OSError", "")}, [0])
    request = own.decide(replace(state, roster=roster), 3).request
    assert tuple(each.name for each in request.clusters) == TOWNS
    assert [each.called for each in request.clusters] == [*TOWNS[:3], "unit 3"]
    assert {each.name for each in roster.clusters} == {""}


@pytest.mark.parametrize(
    ("energy_j", "blocks", "words"),
    [(1e-9, 2, r"\(C8\): paris on channel"), (10.0, 64, r"^round 1: berlin: ")],
)
def test_an_infeasible_round_names_the_unit_without_enough_energy_or_memory(
    tmp_path: Path, energy_j: float, blocks: int, words: str
) -> None:
    own = scheduler(tmp_path, f"model.num_blocks={blocks}", "federation.on_infeasible=stop")
    uplink = Uplink(0.5, energy_j, 1e6, 1e6, (0.9, 0.8))
    state = own.begin([replace(each, uplink=uplink) for each in CLUSTERS])
    with pytest.raises(InfeasibleRoundError, match=words):
        own.decide(state, 1)


def test_if_all_units_have_failed_each_is_named(tmp_path: Path) -> None:
    failures = {unit: Failure("OSError", f"fault {unit}") for unit in (1, 2, 3)}
    roster = Roster((Failure("OSError", ""), *CLUSTERS[1:])).after_failures(1, failures, ())
    with pytest.raises(RoundFailedError, match=r"paris: .*; rome: .*; unit 3: "):
        roster.check(1, scheduler(tmp_path).called)


def test_the_error_for_a_spent_privacy_budget_names_the_unit() -> None:
    settings = privacy_settings(clip_norm=1.0, noise_multiplier=1.0, max_epsilon=1e-3)
    with pytest.raises(BudgetSpentError, match=r"after one more of paris$"):
        PrivateMean(settings, 1.0).check([1], TOWNS.__getitem__)


def test_the_error_for_a_model_that_is_not_finite_names_the_unit(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "unused", ["framework=pipeline"])
    model = GlobalModel(settings)
    not_finite = {"w": torch.tensor([math.nan])}
    with pytest.raises(NonFiniteLossError, match="paris's w"):
        model.learn(1, Updates({1: not_finite}, {1: 1.0}, {}), TOWNS.__getitem__)


def test_units_that_have_changed_since_the_checkpoint_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = scheduler(tmp_path)
    with caplog.at_level(logging.WARNING):
        then = own.begin([replace(each, num_samples=99) for each in CLUSTERS])
        own.resumed(then, own.begin(CLUSTERS).roster)
    assert "berlin, paris, rome and 1 more: devices, rows or bits" in caplog.text
