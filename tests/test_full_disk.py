"""A disk that fills up while a run writes: the error names the file, and the summary records it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federated import play
from full_disk import full_disk
from pytest import MonkeyPatch
from round_report import round_report
from run_files import summary_of
from scripted_units import UNTRAINED, scripted_units
from torch.utils.tensorboard import SummaryWriter

from collapipe.deployment.server_folder import ServerFolder
from collapipe.errors import StorageError
from collapipe.runs.folder import RunFolder
from server_app import training
from server_app.records import run_log


def without_room(action: Callable[..., Any]) -> Callable[..., Any]:
    def full(*arguments: Any, **named: Any) -> Any:
        with full_disk():
            return action(*arguments, **named)

    return full


@pytest.mark.parametrize(
    ("place", "name", "file"),
    [
        (training, "write_shard_report", "shards.json"),
        (run_log.RunLog, "add", "requests.jsonl.gz"),
        (RunFolder, "append_metrics", "metrics.jsonl"),
        (SummaryWriter, "flush", "tensorboard"),
    ],
    ids=["shards", "log", "metrics", "curves"],
)
def test_a_full_disk_ends_the_run_and_the_error_names_the_file(
    tmp_path: Path, monkeypatch: MonkeyPatch, place: object, name: str, file: str
) -> None:
    monkeypatch.setattr(place, name, without_room(getattr(place, name)))
    with pytest.raises(StorageError, match=f"{file}.*make room"):
        play(tmp_path, *UNTRAINED, client=scripted_units())
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert file in summary["error"]


def test_a_checkpoint_gives_way_to_the_model(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The units' states for it arrive first and fill the disk."""
    write = RunFolder.write_weights

    def write_if_room(folder: RunFolder, *model: Any) -> None:
        if [*folder.path.glob("checkpoints/.*.partial")]:
            raise StorageError("model.safetensors: cannot be written")
        write(folder, *model)

    monkeypatch.setattr(RunFolder, "write_weights", write_if_room)
    play(tmp_path, *UNTRAINED, "federation.checkpoint_every=1", client=scripted_units())
    assert summary_of(tmp_path)["status"] == "completed"
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    assert f"no checkpoint is written to {tmp_path}" in caplog.text


@pytest.mark.parametrize(
    "write",
    [
        lambda server: server.note_run("5", Path("/" + 200 * "x")),
        lambda server: server.expect_replies("5", 1, 10**200),
        lambda server: run_log.write_metrics(server.metrics, round_report(1)),
    ],
    ids=["folder", "replies", "metrics"],
)
def test_a_full_disk_of_the_server_ends_the_run_as_one_of_the_runs_folder_does(
    tmp_path: Path, write: Callable[[ServerFolder], None]
) -> None:
    server = ServerFolder(tmp_path)
    (server.flower_home / "runs").mkdir(parents=True)
    with full_disk(), pytest.raises(StorageError, match=r"flower/.*cannot be written.*make room"):
        write(server)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_the_first_error_is_reported_if_the_summary_has_no_room(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    report = without_room(training.write_shard_report)
    monkeypatch.setattr(training, "write_shard_report", report)
    monkeypatch.setattr(RunFolder, "write_summary", without_room(RunFolder.write_summary))
    with pytest.raises(StorageError, match=r"shards\.json"):
        play(tmp_path)
