"""Screening of updates: false weights are excluded, false values are bounded, honest units stay."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import rewritten, run
from flwr.app import Context, Message
from hypothesis import given
from hypothesis import strategies as st
from lying import Lie, Lying
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units

from client_app.app import app as client_app
from collapipe.privacy.clipping import update_norm
from collapipe.tensors import Tensors
from collapipe.wire.records import TRAIN
from server_app.planning.estimates import bounded
from server_app.rounds.aggregation import capped
from server_app.rounds.global_model import GlobalModel, Updates, trimmed_mean
from server_app.rounds.screening import UpdateScreen


def scaled(factor: float) -> Lie:
    """Every weight times the factor."""
    return lambda _, weights: {name: factor * tensor for name, tensor in weights.items()}


def one_huge(sent: Tensors, weights: Tensors) -> Tensors:
    """A single weight of 1e38."""
    name, tensor = next(iter(weights.items()))
    changed = tensor.clone()
    changed.view(-1)[0] = 1e38
    return {**weights, name: changed}


def whole() -> float:
    """‖θ‖ of a model."""
    return 5.0


def lied_to(folder: Path, lie: Lie, trains: bool) -> Tensors:
    """The weights after two rounds in which unit 1 lies; the heads of units that train are on the
    server."""
    app, options = (client_app, ()) if trains else (scripted_units(), UNTRAINED)
    return run(folder, *options, client=Lying(lie, {1}, app))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def without_unit_1(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tensors]:
    """The weights after two rounds in which unit 1 never finishes, if units train or not."""
    folder = tmp_path_factory.mktemp("without")
    return {each: lied_to(folder / str(each), scaled(math.nan), each) for each in (True, False)}


@pytest.mark.parametrize(
    ("lie", "trains"),
    [(scaled(1e6), True), (scaled(0.0), False), (scaled(-1.0), False), (one_huge, False)],
)
def test_a_unit_with_false_weights_does_not_change_the_result(
    lie: Lie, trains: bool, without_unit_1: dict[bool, Tensors], tmp_path: Path
) -> None:
    found = lied_to(tmp_path / "run", lie, trains)
    expected = without_unit_1[trains]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for line in rounds_of(tmp_path / "run"):
        assert line["units"] == [0, 2]
        assert line["failures"]["1"].startswith(("OutlyingUpdate", "WireError"))


def test_a_median_resists_false_weights_without_screening(tmp_path: Path) -> None:
    """A unit's weights that are 1e6 times too large move the model by a norm of less than 10."""
    options = "server_optimizer.average=median", "federation.max_update_norm=null"
    honest = run(tmp_path / "honest", *options)
    lied = run(tmp_path / "lied", *options, client=Lying(scaled(1e6), {1}))  # type: ignore[arg-type]
    assert rounds_of(tmp_path / "lied")[-1]["units"] == [0, 1, 2]
    assert update_norm(lied, honest) < 10


@given(
    st.lists(st.floats(1e-3, 10), min_size=3, max_size=9),
    st.lists(st.one_of(st.floats(101, 1e30), st.just(0.0), st.just(math.inf)), max_size=4),
)
def test_a_minority_cannot_have_an_honest_unit_excluded(
    honest: list[float], lies: list[float]
) -> None:
    """The norms of honest units differ by less than the factor."""
    low = max(honest) / 9
    honest = [max(each, low) for each in honest]
    lies = lies[: (len(honest) - 1)]
    norms = dict(enumerate([*honest, *lies]))
    found = UpdateScreen(10.0).outlying(norms, whole)
    assert all(unit >= len(honest) for unit in found)
    large = {len(honest) + k for k, lie in enumerate(lies) if lie > 10 * max(honest)}
    assert large <= found.keys()


def test_one_or_two_units_are_compared_with_their_own_past_norms() -> None:
    screen = UpdateScreen(10.0)
    assert not screen.outlying({0: 1.0}, whole)
    assert list(screen.outlying({0: 1e3}, whole)) == [0]
    assert not screen.outlying({0: 9.0, 1: 1.0}, whole)
    for _ in range(3):
        assert not screen.outlying({0: 1.0, 1: 2.0}, whole)
        assert list(screen.outlying({0: 1e-9, 1: 1e6}, whole)) == [1]
    assert not screen.outlying({0: 1e-9, 1: 2.0}, whole)
    resumed = UpdateScreen(10.0, dict(screen.past))
    found = resumed.outlying({1: 30.0}, whole), screen.outlying({1: 30.0}, whole)
    assert found[0].keys() == found[1].keys() == {1}
    assert UpdateScreen(None).outlying({0: 1.0, 1: 1e30, 2: 1.0}, whole) == {}


@pytest.mark.parametrize("norms", [{1: 1e30}, {0: 0.0, 1: 1e30, 2: 0.0}, {0: 1.0, 1: 1e30}])
def test_a_unit_without_past_norms_is_compared_with_the_weights_norm(
    norms: dict[int, float],
) -> None:
    assert list(UpdateScreen(10.0).outlying(norms, whole)) == [1]
    assert not UpdateScreen(10.0).outlying({1: 9 * whole()}, whole)


def test_updates_of_zero_do_not_let_large_updates_pass() -> None:
    fresh, screen = UpdateScreen(10.0), UpdateScreen(10.0)
    assert not screen.outlying({0: 1.0}, whole)
    for _ in range(9):
        assert not fresh.outlying({0: 0.0}, whole) and not screen.outlying({0: 0.0}, whole)
    assert list(fresh.outlying({0: 11 * whole()}, whole)) == [0]
    assert list(screen.outlying({0: 11.0}, whole)) == [0]
    several = UpdateScreen(10.0)
    for _ in range(2):
        assert not several.outlying({0: 0.0, 1: 0.0, 2: 0.0}, whole)
    assert list(several.outlying({1: 11 * whole()}, whole)) == [1]


def test_a_unit_that_is_mostly_alone_cannot_raise_its_norm_step_by_step() -> None:
    screen = UpdateScreen(10.0)
    for unit in range(3):
        assert not screen.outlying({unit: 1.0}, whole)
    accepted = [norm for norm in np.geomspace(1, 1e6, 99) if not screen.outlying({0: norm}, whole)]
    assert max(accepted) <= 10
    assert not screen.outlying({2: 1.0}, whole)  # and cannot have others excluded


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.floats(1, 12))
def test_no_share_is_above_the_cap(tokens: list[int], most: float) -> None:
    """Shares above the cap become equal to it, and no other share changes."""
    shares = {unit: float(each) for unit, each in enumerate(tokens)}
    found = capped(shares, most)
    limit = most * sum(found.values()) / len(found)
    assert max(found.values()) <= limit * (1 + 1e-9)
    for unit, share in shares.items():
        assert found[unit] == share or share >= found[unit] >= limit * (1 - 1e-9)


def test_values_far_from_the_others_are_cut() -> None:
    assert bounded([1.0, 2.0, 1e99], 10.0, before=[1e99]) == [1.0, 2.0, 20.0]
    assert bounded([-1e99, 2.0, 3.0], 10.0, before=[]) == [0.0, 2.0, 3.0]


def test_values_of_few_units_are_also_bounded_by_the_previous_round() -> None:
    assert bounded([1e99], 10.0, before=[1.0]) == [10.0]
    assert bounded([1e99, 2.0], 10.0, before=[1.0]) == [20.0, 2.0]
    assert bounded([1e99], 10.0, before=[]) == [1e99]  # there is no other value


@pytest.mark.parametrize("limit", ["10", "null"])
def test_false_values_of_a_unit_have_a_bounded_effect_on_estimates(
    limit: str, tmp_path: Path
) -> None:
    """The effect is also bounded if norms of updates are not compared, as in runs with noise."""
    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == TRAIN and context.node_config["partition-id"] == 1:
            with rewritten(reply) as decoded:
                for name, figure in (("losses", 9e5), ("squared_norms", 1e30)):
                    decoded["report"][name][:] = [figure] * len(decoded["report"][name])
        return reply

    option = f"federation.max_update_norm={limit}"
    run(tmp_path / "run", *UNTRAINED, option, client=lying)  # type: ignore[arg-type]
    last = rounds_of(tmp_path / "run")[-1]
    assert last["units"] == [0, 1, 2] and last["train_loss"] > 1e5
    assert 0 < last["estimates"]["gradient_bound"] < 1e3


def test_a_unit_that_is_alone_in_its_first_round_does_not_end_the_run(tmp_path: Path) -> None:
    """The unit's weights of 1e30 would make every honest unit diverge."""
    lie = scaled(1e30)
    options = *UNTRAINED, "channel.num_channels=1", "federation.rounds=6"
    run(tmp_path / "run", *options, client=Lying(lie, {1}, scripted_units()))  # type: ignore[arg-type]
    reports = rounds_of(tmp_path / "run")
    assert all(line["units"] != [1] for line in reports)
    assert {unit for line in reports for unit in line["units"]} == {0, 2}


def test_false_token_counts_raise_a_units_weight_only_to_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads are on the units, so the server cannot count the tokens itself."""
    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == TRAIN and context.node_config["partition-id"] == 1:
            with rewritten(reply) as decoded:
                decoded["report"]["target_tokens"] = 480  # 2 steps of 6 rows of 40
        return reply

    found, real = list[dict[int, float]](), GlobalModel.learn

    def learn(model: GlobalModel, round_: int, updates: Updates, called: Any) -> Any:
        found.append(dict(updates.shares))
        return real(model, round_, updates, called)

    monkeypatch.setattr(GlobalModel, "learn", learn)
    options = *UNTRAINED, "federation.num_units=5", "strategy=all"
    options += ("federation.max_share=1.2",)
    run(tmp_path / "run", *options, client=lying)  # type: ignore[arg-type]
    for shares in found:
        assert shares[1] == max(shares.values())
        assert shares[1] / sum(shares.values()) == pytest.approx(1.2 / 5)
    assert len(found) == 2


@given(st.integers(1, 6))
def test_a_trimmed_mean_is_the_mean_without_and_the_median_with_full_trimming(count: int) -> None:
    stacked = torch.randn(count, 3, 2, generator=torch.Generator().manual_seed(count))
    models = [{"w": tensor, "n": torch.tensor(3)} for tensor in stacked]
    halves, none = trimmed_mean(models, (count - 1) // 2), trimmed_mean(models, 0)
    torch.testing.assert_close(halves["w"], stacked.quantile(0.5, dim=0))
    torch.testing.assert_close(none["w"], stacked.mean(dim=0))
    assert halves["n"] == 3
