"""Compressed messages have as many bits as planned, and frozen weights are sent once."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import grid_of, run, settings_of, train, weights
from flwr.app import Context, Message
from run_files import rounds_of, summary_of

from client_app import node
from client_app.control_unit import ControlUnit
from collapipe.errors import RoundFailedError
from collapipe.models.split import HEAD, frozen_names
from collapipe.runs.model import initial_model, load_model
from collapipe.runs.rows import build_tokenizer
from collapipe.state import ClusterState
from collapipe.wire import records
from collapipe.wire.frozen_store import FrozenStore, default_folder

LORA = ("adapter=lora", "adapter.rank=2", "optimizer.lr=1.0e-2")


@pytest.fixture(autouse=True)
def _no_parts_of_other_tests() -> Iterator[None]:
    """Clear the parts that this process has cached: each test has its own store."""
    node.cached_parts.cache_clear()
    yield
    node.cached_parts.cache_clear()


def states(run_dir: Path, *overrides: str) -> list[ClusterState]:
    """Return the states that the units of such a run report."""
    settings = settings_of(run_dir, overrides)
    tokenizer = build_tokenizer(settings)
    units = range(settings.federation.num_units)
    return [ControlUnit(settings, unit, tokenizer).state() for unit in units]


@pytest.mark.parametrize(
    ("precision", "dtype", "adapter"),
    [
        pytest.param("float32", "float32", (), marks=pytest.mark.thorough),
        pytest.param("float32", "float64", LORA, marks=pytest.mark.thorough),
        pytest.param("bfloat16", "float32", LORA, marks=pytest.mark.thorough),
        pytest.param("bfloat16", "float64", (), marks=pytest.mark.thorough),
        pytest.param("int8", "float64", (), marks=pytest.mark.thorough),
        pytest.param("int8", "float64", LORA, marks=pytest.mark.thorough),
        pytest.param("int6", "float32", LORA, marks=pytest.mark.thorough),
        ("int4", "float32", ()),
    ],
)
def test_planned_bits_equal_sent_bits(
    tmp_path: Path, precision: str, dtype: str, adapter: tuple[str, ...]
) -> None:
    """Exactly, over an epoch: the planner expects the epoch's mean per round."""
    epoch = ("federation.local_steps=1", "federation.rounds=2", "federation.num_units=3")
    each = "upload", "activation", "gradient"
    options = tuple(f"compression.{what}={precision}" for what in each)
    options += (*adapter, *epoch, "data.max_train_samples=39", f"pipeline.dtype={dtype}")
    run(tmp_path, *options)
    sent = sum(line["bytes_up"] for line in rounds_of(tmp_path))
    bits = sum(s.uplink.model_bits + s.uplink.activation_bits for s in states(tmp_path, *options))
    assert 2 * bits == 8 * sent


def test_with_heads_on_control_units_only_weights_are_sent(tmp_path: Path) -> None:
    options = ("decoder.mode=control_unit", "compression=int8")
    run(tmp_path, *options)
    planned = states(tmp_path, *options)
    assert [state.uplink.activation_bits for state in planned] == [0.0] * 3
    assert sum(s.uplink.model_bits for s in planned) == 8 * rounds_of(tmp_path)[0]["bytes_up"]


@pytest.mark.thorough
def test_error_feedback_compensates_for_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With error feedback, the squared distance from exact uploads is less than half as large."""
    options = ("federation.rounds=4", "federation.local_steps=1", "optimizer=sgd")
    options += ("model.dropout=0",)
    rounded = ("bfloat16", "int4")
    exact = run(tmp_path / "exact", *options)

    def distances(name: str) -> list[float]:
        upload = "compression.upload"
        models = [run(tmp_path / name / each, *options, f"{upload}={each}") for each in rounded]
        return [
            sum(float((model[name] - exact[name]).square().sum()) for name in exact)
            for model in models
        ]

    repaid = distances("repaid")
    monkeypatch.setattr(node, "kept_groups", _only_the_optimizer(node.kept_groups))
    for kept, lost in zip(repaid, distances("lost"), strict=True):
        assert 0 < kept < 0.5 * lost


def _only_the_optimizer(kept: Any) -> Any:
    def forgetful(context: Context) -> dict[str, dict[str, torch.Tensor]]:
        return {key: group for key, group in kept(context).items() if key == "optimizer"}

    return forgetful


def test_only_adapters_train(tmp_path: Path) -> None:
    run(tmp_path, *LORA, "federation.num_units=1")
    settings, _, tokenizer = load_model(tmp_path)
    frozen = frozen_names(settings.model, tokenizer.vocabulary)
    first, last = initial_model(settings, tokenizer).state_dict(), weights(tmp_path)
    same = {name for name in last if torch.equal(first[name], last[name])}
    assert frozen == same
    assert all("lora" in name for name in last if name not in same)


def test_adapters_in_a_pipeline_equal_adapters_of_the_unsplit_model(tmp_path: Path) -> None:
    short = "federation.num_units=2", "federation.local_steps=1"
    options = (*LORA, "pipeline.dtype=float64", "model.dropout=0", *short)
    pipelined = run(tmp_path / "collapipe", *options)
    unsplit = run(tmp_path / "vanilla", *options, "framework=vanilla_fl")
    for name, weight in pipelined.items():
        torch.testing.assert_close(weight, unsplit[name], rtol=0, atol=1e-8)


def test_frozen_weights_are_sent_once(tmp_path: Path) -> None:
    """Units of one machine share a store, so that a second run receives no frozen weights."""
    run(tmp_path / "first", *LORA, "federation.num_units=1")
    run(tmp_path / "second", *LORA, "federation.num_units=1")
    first, second = (summary_of(tmp_path / name) for name in ("first", "second"))
    settings, model, tokenizer = load_model(tmp_path / "first")
    state, frozen = model.state_dict(), frozen_names(settings.model, tokenizer.vocabulary)
    parts = [state[name].nbytes for name in frozen if not name.startswith(HEAD)]
    assert first["bytes_down"] - second["bytes_down"] == sum(parts)
    again = load_model(tmp_path / "second")[1].state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in state.items())


def test_a_damaged_part_is_sent_again(tmp_path: Path) -> None:
    run(tmp_path / "first", *LORA, "federation.num_units=1")
    kept = sorted(default_folder().iterdir())
    assert len(kept) == 5  # the embedding and four blocks
    kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"?")
    node.cached_parts.cache_clear()
    run(tmp_path / "second", *LORA, "federation.num_units=1")
    assert all(FrozenStore(default_folder()).load(file.stem) for file in kept)


def test_a_part_that_was_not_announced_is_not_stored(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, [*LORA, "federation.num_units=1"])
    grid = grid_of(settings)
    send = grid.send_and_receive

    def tampered(messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == records.FROZEN:
                message.content["blocks.0"] = message.content.pop("embedding")
        return send(messages, timeout=timeout)

    grid.send_and_receive = tampered  # type: ignore[method-assign]
    with pytest.raises(
        RoundFailedError, match=r"part 'blocks\.0' is not the one that was announced"
    ):
        train(grid, settings)
    assert not default_folder().exists()
