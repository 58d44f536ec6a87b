"""On one machine, units keep their state between rounds in files and not in memory."""

import threading
from pathlib import Path

import pytest
import torch
from federated import grid_of, settings_of, train
from flwr.app import Context, Error, Message
from full_disk import full_disk
from resumed import World, differing, outcome, tensors

from client_app.app import app
from collapipe.errors import CancelledRoundError, StorageError
from collapipe.process.cancellation import cancellable
from collapipe.tensors import Tensors
from collapipe.wire import kept_file, records
from collapipe.wire.kept_file import IN_ENVIRONMENT, IN_NODE, KeptFile
from collapipe.wire.parts import pieces
from server_app import questions
from server_app.checkpoints.folder import CheckpointFolder
from server_app.units import Kept

ALL = ("optimizer.name=adamw", "compression.feedback=true", "compression=int4", "model.dropout=0")
GROUPS = {"optimizer": {"a.b/exp_avg": torch.tensor([1.0, -0.0]), "n": torch.tensor(3)}}


def test_state_is_in_private_files_and_not_in_contexts(tmp_path: Path) -> None:
    """Optimiser, residual and activations of three units; the files are deleted with the grid."""
    settings = settings_of(tmp_path, ALL)
    with grid_of(settings) as grid:
        train(grid, settings)
        states = [context.state for context in grid._contexts.values()]
        assert [records.content_bytes(state) for state in states] == [0, 0, 0]
        files = [records.unpack(KeptFile, state) for state in states]
        assert {each.path.stat().st_mode & 0o777 for each in files} == {0o600}
        folder = files[0].path.parent
        assert sorted(folder.iterdir()) == sorted(each.path for each in files)
        assert folder.stat().st_mode & 0o777 == 0o700
        kept = {"optimizer", "residual", "activations", "last_activations"}
        assert [each.read().keys() for each in files] == [kept] * 3
    assert not folder.exists()


@pytest.mark.parametrize(
    "options",
    [
        ALL,
        pytest.param(("compression=int8", "decoder.mode=control_unit"), marks=pytest.mark.thorough),
    ],
)
def test_state_in_files_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Compared with units that keep everything in their contexts. The node's configuration or the
    process's environment names the file."""

    def in_memory(message: Message, context: Context) -> Message:
        context.node_config.pop(IN_NODE, None)
        return app(message, context)

    world = World(tmp_path, *options, "federation.rounds=2", "federation.keep=2")
    expected = world.run(tmp_path / "memory", client=in_memory)  # type: ignore[arg-type]
    found = world.run(tmp_path / "files")
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv(IN_ENVIRONMENT, str(tmp_path / "kept"))
    again = world.run(tmp_path / "environment", client=in_memory)  # type: ignore[arg-type]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    for run_dir in (found, again):
        assert differing(tensors(run_dir), tensors(expected)) == []
        assert outcome(run_dir) == outcome(expected)


def test_a_unit_whose_disk_was_full_continues_from_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run equals one in which the unit was unavailable in that round."""
    full = set[str]()

    def pieces_or_none(tensors: Tensors) -> list[bytes | memoryview]:
        if threading.current_thread().name in full:
            raise OSError(28, "No space left on device")
        return pieces(tensors)

    def without_room(message: Message, context: Context) -> Message:
        if not is_missed(message, context):
            return app(message, context)
        full.add(threading.current_thread().name)
        try:
            return app(message, context)
        finally:
            full.clear()  # only for this unit: the other one trains meanwhile

    def away(message: Message, context: Context) -> Message:
        if is_missed(message, context):
            return Message(Error(5, "not there"), reply_to=message)
        return app(message, context)

    def is_missed(message: Message, context: Context) -> bool:
        return message.metadata.group_id == "2" and context.node_config["partition-id"] == 0

    monkeypatch.setattr(kept_file, "pieces", pieces_or_none)
    world = World(tmp_path, "optimizer.name=adamw", "compression=int8", "federation.miss_limit=2")
    found = world.run(tmp_path / "full", client=without_room)  # type: ignore[arg-type]
    expected = world.run(tmp_path / "away", client=away)  # type: ignore[arg-type]
    assert "StorageError" in outcome(found)["metrics"][1]["failures"]["0"]
    assert differing(tensors(found), tensors(expected)) == []


def test_a_checkpoint_without_room_on_the_server_changes_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units send their states before the server knows that it cannot store them."""
    world, add = World(tmp_path, "optimizer.name=adamw"), CheckpointFolder.add

    def full(files: CheckpointFolder, name: str, unit: int, kept: Kept) -> None:
        if name == "000002":
            raise OSError(28, "No space left on device")
        add(files, name, unit, kept)

    expected = world.run(tmp_path / "room")
    monkeypatch.setattr(CheckpointFolder, "add", full)
    found = world.run(tmp_path / "full")
    assert not (found / "checkpoints" / "000002").exists()
    assert outcome(found)["metrics"] == outcome(expected)["metrics"]
    monkeypatch.setattr(questions, "_AT_ONCE", 1)
    fewer = world.run(tmp_path / "fewer")
    sent = [[m["checkpoint_bytes"] for m in outcome(run)["metrics"]] for run in (expected, fewer)]
    assert sent[0][1] > sent[1][1] > 0  # the second unit was not asked
    assert sent[0][2] == sent[1][2]


def test_if_no_unit_has_room_the_error_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Tensors) -> list[bytes | memoryview]:
        raise OSError(28, "No space left on device")

    settings = settings_of(tmp_path, ())
    monkeypatch.setattr(kept_file, "pieces", full)
    with grid_of(settings) as grid:
        folder = grid._kept.path
        with pytest.raises(StorageError, match=rf"{folder}: .*make room there, or set TMPDIR"):
            train(grid, settings)
        assert list(folder.iterdir()) == []


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    file = KeptFile(tmp_path / "2.safetensors")
    file.write(GROUPS)
    with full_disk(), pytest.raises(StorageError, match=str(tmp_path)):
        file.write({"optimizer": {"n": torch.zeros(100)}})
    assert differing(file.read()["optimizer"], GROUPS["optimizer"]) == []
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_write_in_a_cancelled_round_keeps_the_previous_file(tmp_path: Path) -> None:
    file = KeptFile(tmp_path / "2.safetensors")
    file.write(GROUPS)
    with cancellable() as scope, pytest.raises(CancelledRoundError):
        scope.cancel()
        file.write({"optimizer": {"n": torch.tensor(4)}})
    assert differing(file.read()["optimizer"], GROUPS["optimizer"]) == []
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="resume"):
        KeptFile(tmp_path / "2.safetensors").read()
