"""The strategy in a user's ServerApp of three lines."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from federated import grid_of, run, settings_of
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from scripted_units import UNTRAINED, scripted_units

from collapipe.errors import ConfigError
from collapipe.runs.rows import make_tokenizer
from server_app.evaluation import Evaluated, RunEvaluator
from server_app.rounds.strategy import CollaPipeStrategy
from server_app.units import Units

ROOT = Path(__file__).parents[3]


@pytest.fixture
def made(tmp_path: Path) -> tuple[CollaPipeStrategy, Grid]:
    """A new strategy, and units that do not train."""
    settings = settings_of(tmp_path, UNTRAINED)
    grid = grid_of(settings, scripted_units())
    tokenizer = make_tokenizer(settings, Units(grid, settings).rows().values())
    return CollaPipeStrategy(settings, tokenizer), grid


def test_the_documented_server_app_trains_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "federation.rounds=3", "federation.local_steps=1"
    expected = run(tmp_path / "run", *options)
    page = (ROOT / "docs/how-to/extend.md").read_text().partition("## A Flower app of your own")[2]
    example = dict[str, Any]()
    exec(page.split("```")[1].removeprefix("python"), example)
    results, start = list[Result](), CollaPipeStrategy.start
    monkeypatch.setattr(
        CollaPipeStrategy, "start", lambda *args, **named: results.append(start(*args, **named))
    )
    settings = settings_of(tmp_path / "plain", options)
    context = Context(1, 1, {}, RecordDict(), {"settings": settings.text})
    example["app"](grid_of(settings), context)
    assert results[0].arrays is not None
    found = results[0].arrays.to_torch_state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert list(results[0].train_metrics_clientapp) == [1, 2, 3]
    assert not (tmp_path / "plain").exists()


def test_a_run_begins_with_the_arrays_that_it_is_given(
    made: tuple[CollaPipeStrategy, Grid],
) -> None:
    """A caller may have changed the arrays of ``initial_arrays`` in place."""
    strategy, grid = made
    arrays = strategy.initial_arrays()
    for name in [*arrays]:
        arrays[name] = Array(np.zeros_like(arrays[name].numpy()))
    found = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=0).arrays
    assert found is not None and found.keys() == arrays.keys()
    assert not any(each.numpy().any() for each in found.values())


def test_a_strategy_runs_once(made: tuple[CollaPipeStrategy, Grid]) -> None:
    """Its queues, optimisers and ε belong to one run; a refused start does not count."""
    strategy, grid = made
    arrays = strategy.initial_arrays()
    with pytest.raises(ConfigError, match="timeout"):
        strategy.start(grid=grid, initial_arrays=arrays, timeout=0)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)
    with pytest.raises(ConfigError, match="already run; make another CollaPipeStrategy"):
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)


def test_without_arrays_a_new_strategy_begins_with_the_untrained_model(
    made: tuple[CollaPipeStrategy, Grid],
) -> None:
    strategy, grid = made
    with strategy.opened(grid):
        begun = {name: each.clone() for name, each in strategy.model.whole().items()}
    expected = strategy.initial_arrays().to_torch_state_dict()
    assert begun.keys() == expected.keys()
    assert [name for name in begun if not torch.equal(begun[name], expected[name])] == []


def test_rounds_in_no_open_strategy_are_refused(
    made: tuple[CollaPipeStrategy, Grid],
) -> None:
    strategy, grid = made
    with pytest.raises(ConfigError, match=r"^num_rounds=-1: must be 0 or more$"):
        strategy.start(grid=grid, initial_arrays=strategy.initial_arrays(), num_rounds=-1)
    _refused_as_not_open(strategy)
    with strategy.opened(grid):
        assert strategy.state().training.weights
        with pytest.raises(ConfigError, match=r"^round_=0: must be at least 1, the first round$"):
            strategy.run_round(0)  # units would wait for steps before the first one
    _refused_as_not_open(strategy)


def _refused_as_not_open(strategy: CollaPipeStrategy) -> None:
    for call in (lambda: strategy.run_round(1), strategy.state):
        with pytest.raises(ConfigError, match=r"not open; .* inside `with strategy\.opened"):
            call()


def test_a_linear_decay_never_gets_a_learning_rate_below_0(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, (*UNTRAINED, "optimizer.decay=linear"))
    grid = grid_of(settings, scripted_units())
    tokenizer = make_tokenizer(settings, Units(grid, settings).rows().values())
    strategy = CollaPipeStrategy(settings, tokenizer)
    why = r"3: optimizer\.decay=linear ends with federation\.rounds=2; raise it$"
    with pytest.raises(ConfigError, match=f"^num_rounds={why}"):
        strategy.start(grid=grid, initial_arrays=strategy.initial_arrays(), num_rounds=3)
    with strategy.opened(grid):
        strategy.run_round(2)
        with pytest.raises(ConfigError, match=f"^round_={why}"):
            strategy.run_round(3)


def test_the_model_is_never_packed_for_flower(tmp_path: Path) -> None:
    with (
        patch("server_app.rounds.arrays.ArrayRecord", wraps=ArrayRecord) as packed,
        patch.object(ArrayRecord, "to_torch_state_dict") as unpacked,
    ):
        options = "decoder.mode=control_unit", "federation.rounds=4", "federation.eval_every=1"
        run(tmp_path, *options, client=scripted_units())
    assert (packed.call_count, unpacked.call_count) == (0, 0)


def test_a_round_is_shown_before_its_evaluation_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation may take long or fail."""
    shown, evaluate = list[str](), RunEvaluator.evaluate

    def seen(self: RunEvaluator, *arguments: Any) -> Evaluated:
        shown.append(capsys.readouterr().out)
        return evaluate(self, *arguments)

    monkeypatch.setattr(RunEvaluator, "evaluate", seen)
    run(tmp_path, "federation.rounds=1")
    assert "round 1/1  train loss" in shown[0]
