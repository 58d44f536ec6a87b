"""A disk that fills up while a run writes: one line, and what was written stays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federated import play
from full_disk import full_disk
from pytest import MonkeyPatch
from torch.utils.tensorboard import SummaryWriter

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
def test_a_full_disk_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: MonkeyPatch, place: object, name: str, file: str
) -> None:
    monkeypatch.setattr(place, name, without_room(getattr(place, name)))
    with pytest.raises(StorageError, match=f"{file}.*make room"):
        play(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert file in summary["error"]


def test_where_the_summary_has_no_room_the_first_reason_is_told(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    report = without_room(training.write_shard_report)
    monkeypatch.setattr(training, "write_shard_report", report)
    monkeypatch.setattr(RunFolder, "write_summary", without_room(RunFolder.write_summary))
    with pytest.raises(StorageError, match=r"shards\.json"):
        play(tmp_path)
