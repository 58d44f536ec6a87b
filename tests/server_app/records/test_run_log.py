"""The records that a run writes: rows for spreadsheets, curves for trackers."""

import csv
import importlib
import socket
import sys
import time
from pathlib import Path

import pytest
from federated import play, settings_of
from round_report import round_report
from run_files import rounds_of, summary_of

from collapipe.errors import ConfigError
from collapipe.runs.folder import RunFolder
from server_app.records.run_log import _scalars, csv_row, mlflow_log, tensorboard_curves


def test_metrics_csv_has_a_row_for_each_round(tmp_path: Path) -> None:
    play(tmp_path)
    lines = rounds_of(tmp_path)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert tuple(rows[0]) == tuple(csv_row(round_report()))
    assert [float(row["train_loss"]) for row in rows] == [line["train_loss"] for line in lines]


def test_a_round_without_training_has_no_speed() -> None:
    phases = {"plan": 2.0, "round": 2.0}
    assert "train/tokens_per_s" not in _scalars(round_report(seconds=phases))
    trained = round_report(seconds=phases | {"train": 1.0}, input_tokens=6)
    assert _scalars(trained)["train/tokens_per_s"] == 3.0


def test_curves_need_no_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard would import an installed one, here a module that cannot be imported."""
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "tensorboard.compat.notf", raising=False)
    with tensorboard_curves(RunFolder(tmp_path / "run"), 0) as log:
        log({"train/loss": 1.0}, 1)
    choose = importlib.reload(importlib.import_module("tensorboard.compat")).tf
    assert choose.compat.as_str("stub") == "stub"
    assert [*(tmp_path / "run" / "tensorboard").glob("events.*")]


def test_mlflow_gets_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the test has no MLflow server
    uri = (tmp_path / "store").as_uri()
    play(tmp_path / "run", f"tracking.mlflow='{uri}'")
    client, run_id = MlflowClient(uri), (tmp_path / "run" / "mlflow_run_id").read_text()
    lines = rounds_of(tmp_path / "run")
    history = client.get_metric_history(run_id, "train/loss")
    assert [entry.value for entry in history] == [line["train_loss"] for line in lines]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["task"]) == ("FINISHED", "dates")


def test_a_run_continues_if_mlflow_stops_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    answers = iter([MlflowClient.log_batch])  # one answer: for the run's parameters

    def log_batch(*arguments: object, **named: object) -> None:
        next(answers, refused)(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(MlflowClient, "set_terminated", refused)
    play(tmp_path / "run", f"tracking.mlflow='{(tmp_path / 'store').as_uri()}'")
    assert summary_of(tmp_path / "run")["status"] == "completed"
    for what in ("round 1", "round 2", "the run's end"):
        assert f"tracking.mlflow: {what} is not logged: connection refused" in caplog.text


def test_an_mlflow_that_never_answers_causes_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server accepts connections and never replies."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    settings = settings_of(tmp_path, [])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with mlflow_log(uri, RunFolder(tmp_path), settings) as log:
            log({"train/loss": 1.0}, 1)
        assert time.monotonic() - began < 60
    assert [uri in record.getMessage() for record in caplog.records] == [True]


def test_without_mlflow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'collapipe\[tracking\]'"):
        play(tmp_path, "tracking.mlflow='http://localhost:1'")
