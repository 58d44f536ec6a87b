"""Liars among units: what is averaged without them, and what honest units lose by the check."""

import json
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
from scripted_units import UNTRAINED, scripted_units

from collapipe.privacy.clipping import update_norm
from collapipe.tensors import Tensors
from collapipe.wire.records import TRAIN
from server_app.rounds.aggregation import capped
from server_app.rounds.global_model import GlobalModel, trimmed_mean
from server_app.rounds.screening import UpdateScreen, bounded


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


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def without_unit_1(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """What two rounds come to in which unit 1 never finishes."""
    folder = tmp_path_factory.mktemp("without") / "run"
    return run(folder, client=Lying(scaled(math.nan), {1}))  # type: ignore[arg-type]


@pytest.mark.parametrize("lie", [scaled(1e6), scaled(0.0), scaled(-1.0), one_huge])
def test_a_liars_weights_leave_no_trace(lie: Lie, without_unit_1: Tensors, tmp_path: Path) -> None:
    found = run(tmp_path / "run", client=Lying(lie, {1}))  # type: ignore[arg-type]
    assert all(torch.equal(found[name], tensor) for name, tensor in without_unit_1.items())
    for line in lines(tmp_path / "run"):
        assert line["units"] == [0, 2]
        assert line["failures"]["1"].startswith(("OutlyingUpdate", "WireError"))


def test_a_median_needs_no_check(tmp_path: Path) -> None:
    """Weights of 1e6 times the size move it no further than others' updates."""
    options = "server_optimizer.average=median", "federation.max_update_norm=null"
    honest = run(tmp_path / "honest", *options)
    lied = run(tmp_path / "lied", *options, client=Lying(scaled(1e6), {1}))  # type: ignore[arg-type]
    assert lines(tmp_path / "lied")[-1]["units"] == [0, 1, 2]
    assert update_norm(lied, honest) < 10


@given(
    st.lists(st.floats(1e-3, 10), min_size=3, max_size=9),
    st.lists(st.one_of(st.floats(101, 1e30), st.just(0.0), st.just(math.inf)), max_size=4),
)
def test_a_minority_cannot_have_an_honest_unit_left_out(
    honest: list[float], lies: list[float]
) -> None:
    """With norms of honest units that differ by less than the factor."""
    low = max(honest) / 9
    honest = [max(each, low) for each in honest]
    lies = lies[: (len(honest) - 1)]
    norms = dict(enumerate([*honest, *lies]))
    found = UpdateScreen(10.0).outlying(norms, whole)
    assert all(unit >= len(honest) for unit in found)
    large = {len(honest) + k for k, lie in enumerate(lies) if lie > 10 * max(honest)}
    assert large <= found.keys()


def test_alone_or_in_two_a_units_own_past_is_what_it_is_held_to() -> None:
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
def test_who_has_no_past_is_held_to_the_weights(norms: dict[int, float]) -> None:
    assert list(UpdateScreen(10.0).outlying(norms, whole)) == [1]
    assert not UpdateScreen(10.0).outlying({1: 9 * whole()}, whole)


def test_updates_that_move_nothing_let_no_other_pass() -> None:
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


def test_a_unit_that_is_mostly_alone_cannot_move_ever_further() -> None:
    screen = UpdateScreen(10.0)
    for unit in range(3):
        assert not screen.outlying({unit: 1.0}, whole)
    accepted = [norm for norm in np.geomspace(1, 1e6, 99) if not screen.outlying({0: norm}, whole)]
    assert max(accepted) <= 10
    assert not screen.outlying({2: 1.0}, whole)  # nor have others left out


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.floats(1, 12))
def test_no_share_is_above_the_cap(tokens: list[int], most: float) -> None:
    """Those below it keep their proportions, and nothing is cut that need not be."""
    shares = {unit: float(each) for unit, each in enumerate(tokens)}
    found = capped(shares, most)
    limit = most * sum(found.values()) / len(found)
    assert max(found.values()) <= limit * (1 + 1e-9)
    cut = {unit for unit in shares if found[unit] != shares[unit]}
    assert all(found[unit] >= limit * (1 - 1e-9) for unit in cut)
    assert cut or found == shares


def test_figures_far_from_the_others_are_cut() -> None:
    assert bounded([1.0, 2.0, 1e99], 10.0, before=[1e99]) == [1.0, 2.0, 20.0]
    assert bounded([-1e99, 2.0, 3.0], 10.0, before=[]) == [0.0, 2.0, 3.0]


def test_of_few_units_the_round_before_has_a_say() -> None:
    assert bounded([1e99], 10.0, before=[1.0]) == [10.0]
    assert bounded([1e99, 2.0], 10.0, before=[1.0]) == [20.0, 2.0]
    assert bounded([1e99], 10.0, before=[]) == [1e99]  # nobody has said anything else


@pytest.mark.parametrize("limit", ["10", "null"])
def test_a_units_figures_move_estimates_no_further_than_ten_of_the_others(
    limit: str, tmp_path: Path
) -> None:
    """Also where no norms of updates are compared, as with noise."""
    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == TRAIN and context.node_config["partition-id"] == 1:
            with rewritten(reply) as told:
                for figures in (told["report"]["losses"], told["report"]["squared_norms"]):
                    figures[:] = [1e30] * len(figures)
        return reply

    option = f"federation.max_update_norm={limit}"
    run(tmp_path / "run", *UNTRAINED, option, client=lying)  # type: ignore[arg-type]
    last = lines(tmp_path / "run")[-1]
    assert last["units"] == [0, 1, 2] and last["train_loss"] > 1e29
    assert 0 < last["estimates"]["gradient_bound"] < 1e3


def test_a_unit_that_is_alone_in_its_first_round_does_not_end_the_run(tmp_path: Path) -> None:
    """With weights of 1e30, after which every honest unit would diverge."""
    lie = scaled(1e30)
    options = *UNTRAINED, "channel.num_channels=1", "federation.rounds=6"
    run(tmp_path / "run", *options, client=Lying(lie, {1}, scripted_units()))  # type: ignore[arg-type]
    told = lines(tmp_path / "run")
    assert all(line["units"] != [1] for line in told)
    assert {unit for line in told for unit in line["units"]} == {0, 2}


def test_tokens_that_a_unit_makes_up_give_it_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run whose heads are the units': no other has counted them."""
    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == TRAIN and context.node_config["partition-id"] == 1:
            with rewritten(reply) as told:
                told["report"]["target_tokens"] = 480  # 2 steps of 6 rows of 40
        return reply

    found, real = list[dict[int, float]](), GlobalModel.learn

    def learn(
        model: GlobalModel, round_: int, models: Any, shares: Any, common: Any, called: Any
    ) -> Any:
        found.append(dict(shares))
        return real(model, round_, models, shares, common)

    monkeypatch.setattr(GlobalModel, "learn", learn)
    options = *UNTRAINED, "federation.num_units=5", "strategy=all"
    options += ("federation.max_share=1.2",)
    run(tmp_path / "run", *options, client=lying)  # type: ignore[arg-type]
    for shares in found:
        assert shares[1] == max(shares.values())
        assert shares[1] / sum(shares.values()) == pytest.approx(1.2 / 5)
    assert len(found) == 2


@given(st.integers(1, 6))
def test_a_trimmed_mean_is_a_median_or_a_mean_at_its_ends(count: int) -> None:
    stacked = torch.randn(count, 3, 2, generator=torch.Generator().manual_seed(count))
    models = [{"w": tensor, "n": torch.tensor(3)} for tensor in stacked]
    halves, none = trimmed_mean(models, (count - 1) // 2), trimmed_mean(models, 0)
    torch.testing.assert_close(halves["w"], stacked.quantile(0.5, dim=0))
    torch.testing.assert_close(none["w"], stacked.mean(dim=0))
    assert halves["n"] == 3
