"""A unit accounts for its owner's ε. It counts a round before it sends the update, and refuses
rounds beyond the limit."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

import client_app.app as handlers
from client_app import node
from collapipe import owner
from collapipe.config import load_overrides
from collapipe.errors import ConfigError, NonFiniteLossError, OwnerError
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport
from collapipe.state import AffineLaw, ClusterState, DeviceProfile
from collapipe.wire import records
from collapipe.wire.messages import Failure, Setup, TrainReply, TrainRequest

THREE = 1.7  # slightly above ε of three rounds with a noise multiplier of 4
OVERRIDES = (
    *("task=classification", "model=huggingface", "model.family=bert", "data.tokenizer=bytes"),
    *("federation.num_units=1", "privacy=private"),
)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return a unit whose owner allows three rounds of ``privacy=private``."""
    (tmp_path / "rows.csv").write_text("text,label\nhen,a\nowl,b\n")
    (tmp_path / "unit.yaml").write_text(
        f"name: berlin\ndata: {{train_file: rows.csv}}\nprivacy: {{lifetime_epsilon: {THREE}}}\n"
    )
    node = {"partition-id": 0, "owner": str(tmp_path / "unit.yaml")}
    setup = Setup(load_overrides(OVERRIDES).text, "", {})
    return Context(1, 0, node, records.pack(setup), {})  # type: ignore[arg-type]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Replace the unit's round by a fixed reply, or by the exception in ``raises`` of the yielded
    dictionary."""
    effects: dict[str, Any] = {}
    device = DeviceProfile("one", AffineLaw(0.0, 1e-3, 0.0, 0.0), max_blocks=9)
    report = ClusterReport(0, (1.0,), 6, 6, squared_norms=(1.0,))
    reply = TrainReply({}, report, ClusterState(0, (device,), 9))

    def run_round(*arguments: Any) -> SimpleNamespace:
        if "raises" in effects:
            raise effects["raises"]
        return SimpleNamespace(reply=reply, kept={}, masked=None)

    monkeypatch.setattr(handlers, "run_round", run_round)
    monkeypatch.setattr(node, "unit_of", lambda *_: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(node, "fixed_parts", lambda *_: None)
    yield effects


def train(context: Context, round_: int = 1) -> Failure | None:
    """Return the failure with which the unit answers a ``train`` message; None if it sends an
    update."""
    request = TrainRequest(round_, ClusterPlan(0, (), 1, "gpipe"), 60.0, None, clip_norm=1.0)
    content = records.pack(request, weights=records.pack_tensors({}))
    reply = handlers.app(Message(content, 2, records.TRAIN), context).content
    return records.unpack(Failure, reply) if Failure.__name__ in reply else None


def test_a_unit_counts_its_rounds_and_refuses_rounds_beyond_the_limit(
    context: Context, trained: dict[str, Any]
) -> None:
    for round_ in (1, 2, 3):
        assert train(context, round_) is None
    refused = train(context, 4)
    assert refused is not None and refused.kind == "BudgetSpentError"
    assert "berlin cannot take part" in refused.message
    reply = handlers.app(Message(RecordDict(), 2, records.MASK_KEYS), context).content
    assert records.unpack(Failure, reply).kind == "BudgetSpentError"


def test_a_round_without_an_update_is_not_counted(
    context: Context, trained: dict[str, Any]
) -> None:
    trained["raises"] = NonFiniteLossError("the loss is nan")
    assert train(context) is not None
    own = owner.account_of(context.node_config)
    assert own is not None and own.spent().rounds == 0


def test_a_kill_before_the_update_is_sent_does_not_undo_the_count(
    context: Context, trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before the round is counted leaves the count as it was."""
    own = owner.account_of(context.node_config)
    assert own is not None
    for place, counted in (("keep_groups", 1), ("checked_account", 1)):
        monkeypatch.setattr(node, place, lambda *arguments: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            train(context)
        assert own.spent().rounds == counted


def test_no_update_is_sent_if_the_account_cannot_be_written(
    context: Context, trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise ConfigError("unit.privacy.json: cannot be written (no space left)")

    monkeypatch.setattr("collapipe.process.files.replace", full)
    failure = train(context)
    assert failure is not None and failure.kind == "OwnerError"
    assert records.trained_round(context.state) == 0


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("privacy.noise_seed=1", "noise_seed must be null"),
        ("privacy=none", "noise_multiplier must be above 0"),
        ("privacy.noise_multiplier=8", None),
    ],
)
def test_a_run_without_effective_noise_is_refused(
    context: Context, option: str, fault: str | None
) -> None:
    text = load_overrides([*OVERRIDES, option]).text
    with nullcontext() if fault is None else pytest.raises(OwnerError, match=fault):
        owner.load_settings(text, context.node_config)


def test_the_account_is_in_a_private_file(
    context: Context, trained: dict[str, Any], tmp_path: Path
) -> None:
    train(context)
    file = tmp_path / "kept" / "unit.privacy.json"
    assert file.stat().st_mode & 0o077 == 0
    assert json.loads(file.read_text()) == {"rounds": 1, "by_server": 1 / 16, "by_units": 0.0}
