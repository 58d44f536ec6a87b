"""A unit's kept state survives its process; only the last run's state is on disk."""

from pathlib import Path

import pytest
import torch
from bad_files import without_elements
from flwr.app import Context, Error, Message
from resumed import World, differing, outcome, tensors

from client_app.answering import go_back
from client_app.app import app
from client_app.kept_store import KeptStore
from collapipe.secure_aggregation.unit import LastMasked, UnitWithKeys
from collapipe.wire import records
from collapipe.wire.kept_file import IN_NODE
from collapipe.wire.messages import KeepRequest


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["optimizer.name=adamw", "compression=int8", "decoder.mode=control_unit"],
            marks=pytest.mark.thorough,
        ),
        ["compression.feedback=true", "compression=int4", "model.dropout=0"],
    ],
    ids=["residual", "activations"],
)
def test_a_unit_that_restarts_for_every_message_trains_the_same(
    tmp_path: Path, options: list[str]
) -> None:
    """Bit for bit; it keeps no state in memory."""

    def restarted(message: Message, context: Context) -> Message:
        context.node_config.pop(IN_NODE, None)  # like a deployed unit
        store = KeptStore(tmp_path / str(context.node_config["partition-id"]))
        store.folder.mkdir(exist_ok=True)
        context.state.clear()
        context.state.update(records.pack_kept(*store.read(context.run_id)))
        reply = app(message, context)
        store.write(context.run_id, *records.unpack_kept(context.state))
        return reply

    world = World(tmp_path, *options)
    whole = world.run(tmp_path / "whole")
    again = world.run(tmp_path / "again", client=restarted)  # type: ignore[arg-type]
    assert differing(tensors(again), tensors(whole)) == []
    assert outcome(again) == outcome(whole)


@pytest.mark.parametrize(
    "misses",
    [1, pytest.param(2, marks=pytest.mark.thorough)],
    ids=["left out", "requested again at once"],
)
def test_a_round_whose_reply_is_lost_leaves_no_state(tmp_path: Path, misses: int) -> None:
    """One unit's process is killed after each message, the other one's continues. The run equals
    one in which they were unavailable in these rounds."""

    def lost(message: Message, context: Context) -> Message:
        context.node_config.pop(IN_NODE, None)  # like a deployed unit
        place = context.node_config["partition-id"]
        store = KeptStore(tmp_path / str(place))
        store.folder.mkdir(exist_ok=True)
        if place == 0:  # killed after each message
            context.state.clear()
            context.state.update(records.pack_kept(*store.read(context.run_id)))
        go_back(store, message, context)
        kind = message.metadata.message_type
        reply = app(message, context)
        kept = records.unpack_kept(context.state)
        store.write(context.run_id, *kept, after_round=kind == records.TRAIN)
        return away(message) if is_missed(message, place) else reply

    def silent(message: Message, context: Context) -> Message:
        if is_missed(message, context.node_config["partition-id"]):
            return away(message)
        return app(message, context)

    def is_missed(message: Message, place: object) -> bool:
        return message.metadata.group_id == {0: "2", 1: "3"}[place]  # type: ignore[index]

    def away(message: Message) -> Message:
        return Message(Error(5, "not there"), reply_to=message)

    options = "optimizer.name=adamw", "compression=int8", "federation.rounds=4"
    world = World(tmp_path, *options, f"federation.miss_limit={misses}")
    found = world.run(tmp_path / "lost", client=lost)  # type: ignore[arg-type]
    expected = world.run(tmp_path / "away", client=silent)  # type: ignore[arg-type]
    assert differing(tensors(found), tensors(expected)) == []
    assert outcome(found) == outcome(expected)


def test_a_unit_without_the_expected_state_starts_afresh(tmp_path: Path) -> None:
    """It has trained in round 1, but the server counts round 3. It keeps the run's setup and the
    masked sum of the round that starts."""
    store = KeptStore(tmp_path)
    context = Context(
        7, 1, {}, records.pack_kept({**MESSAGES, "Trained": '{"round":1}'}, GROUPS), {}
    )
    stage = UnitWithKeys.new(0, 1, 4)
    records.keep_stage(stage, context.state)
    go_back(store, Message(records.pack(KeepRequest(3)), 1, records.KEEP), context)
    assert records.unpack_kept(context.state) == (MESSAGES, {})
    assert records.take_stage(UnitWithKeys, context.state) == stage


def test_a_unit_that_goes_back_and_restarts_knows_its_last_masked_round(tmp_path: Path) -> None:
    """Otherwise a lying server could get two sums of one round."""
    store = KeptStore(tmp_path)
    for round_ in (1, 2):
        texts = {"Trained": f'{{"round":{round_}}}', "LastMasked": f'{{"round":{round_}}}'}
        store.write(7, MESSAGES | texts, GROUPS, after_round=True)
    context = Context(7, 1, {}, records.pack_kept(*store.read(7)), {})
    go_back(store, Message(records.pack(KeepRequest(1)), 1, records.KEEP), context)
    restarted = records.pack_kept(*store.read(7))
    assert records.trained_round(restarted) == 1
    assert records.unpack(LastMasked, restarted) == LastMasked(2)


MESSAGES = {"Setup": '{"tokenizer": "{}"}'}
GROUPS = {"optimizer": {"a.b/exp_avg": torch.tensor([1.0, -0.0]), "n": torch.tensor(3)}}


def test_a_runs_state_is_kept_in_a_private_file_until_the_next_run(tmp_path: Path) -> None:
    store = KeptStore(tmp_path)
    store.write(7, MESSAGES, GROUPS)
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]
    (tmp_path / ".6.safetensors.1.partial").touch()
    messages, groups = store.read(7)
    assert messages == MESSAGES
    assert len(list(tmp_path.iterdir())) == 1  # without the part that a killed process left
    assert groups.keys() == GROUPS.keys()
    assert differing(groups["optimizer"], GROUPS["optimizer"]) == []
    assert store.read(8) == ({}, {})
    assert list(tmp_path.iterdir()) == []


def test_two_runs_at_once_keep_their_states(tmp_path: Path) -> None:
    """A restarted unit continues both: neither run removes the other's files."""
    store = KeptStore(tmp_path)
    assert [store.read(run) for run in (7, 8)] == [({}, {})] * 2
    for round_ in "12":
        for run in (7, 8):
            store.write(run, {"Trained": f"{run}, {round_}"}, GROUPS, after_round=True)
    for run in (7, 8):
        assert store.read(run)[0] == {"Trained": f"{run}, 2"}
        assert store.go_back(run)[0] == {"Trained": f"{run}, 1"}


@pytest.mark.parametrize("content", [b"half", without_elements(2**63)], ids=["half", "shape"])
def test_a_damaged_file_is_reported_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "7.safetensors").write_bytes(content)
    assert KeptStore(tmp_path).read(7) == ({}, {})
    assert "7.safetensors: cannot be read" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_removes_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """No state is better than the state of an earlier round."""
    store = KeptStore(tmp_path)
    store.write(7, MESSAGES, GROUPS)
    store.write(7, MESSAGES, GROUPS, after_round=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fails, full)
    store.write(7, MESSAGES, GROUPS, after_round=True)
    assert "a restart would lose it" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_unit_continues_if_its_folder_becomes_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state is in memory, too."""
    store = KeptStore(tmp_path)
    store.write(7, MESSAGES, GROUPS)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.replace", read_only)
    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    store.write(7, MESSAGES, GROUPS, after_round=True)
    assert "a restart would lose it: [Errno 30] Read-only file system" in caplog.text
