"""A run's folder holds its model, or one model per unit without averaging, and its files."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bad_files import without_elements
from federated import settings_of
from full_disk import full_disk
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from collapipe.cli.app import app
from collapipe.config import Settings
from collapipe.errors import ConfigError, StorageError
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model, load_model
from collapipe.runs.rows import build_tokenizer
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer

UNITS = 3
WEIGHTS = "model/unit-0.safetensors"


def begun(run_dir: Path, *overrides: str) -> tuple[RunFolder, Settings, Tokenizer]:
    """A run's folder with all files except weights."""
    settings = settings_of(run_dir, overrides)
    tokenizer = build_tokenizer(settings)
    folder = RunFolder(run_dir)
    folder.write_config(settings)
    folder.write_tokenizer(tokenizer)
    folder.write_base({})
    return folder, settings, tokenizer


@pytest.fixture
def apart(tmp_path: Path) -> tuple[Path, list[Tensors]]:
    """The folder of a run with ``framework=pipeline``, and its units' models."""
    folder, settings, tokenizer = begun(tmp_path / "run", "framework=pipeline")
    models = []
    for unit in range(UNITS):
        weights = initial_model(settings, tokenizer).state_dict()
        models.append({name: weight + unit for name, weight in weights.items()})
        folder.write_weights(models[-1], unit)
    return folder.path, models


def test_each_unit_has_a_separate_model(apart: tuple[Path, list[Tensors]]) -> None:
    run_dir, models = apart
    for unit in reversed(range(UNITS)):
        _, model, _ = load_model(run_dir, unit=unit)
        found = model.state_dict()
        assert found.keys() == models[unit].keys()
        assert [name for name in found if not torch.equal(found[name], models[unit][name])] == []
    files = {path.name for path in (run_dir / "model").glob("*") if path.suffix != ".json"}
    assert files == {f"unit-{unit}.safetensors" for unit in range(UNITS)}


def test_a_units_model_replaces_its_earlier_model(apart: tuple[Path, list[Tensors]]) -> None:
    run_dir, models = apart
    RunFolder(run_dir).write_weights(models[2], 1)
    found = load_model(run_dir, unit=1)[1].state_dict()
    assert [name for name in found if not torch.equal(found[name], models[2][name])] == []


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (None, r"were not averaged \(framework\.aggregate=false\); --unit N picks one of 0 … 2"),
        (3, r"--unit 3: .* is a run of units 0 … 2"),
        (-1, r"--unit -1: .* is a run of units 0 … 2"),
    ],
)
def test_a_missing_or_wrong_unit_number_is_refused(
    apart: tuple[Path, list[Tensors]], unit: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(apart[0], unit=unit)
    assert "\n" not in str(caught.value)


def test_a_unit_that_never_trained_has_no_model(apart: tuple[Path, list[Tensors]]) -> None:
    (apart[0] / "model" / "unit-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--unit 1: .* no round"):
        load_model(apart[0], unit=1)
    load_model(apart[0], unit=0)


def test_an_averaged_run_has_no_models_of_single_units(tmp_path: Path) -> None:
    folder, settings, tokenizer = begun(tmp_path / "run")
    folder.write_weights(initial_model(settings, tokenizer).state_dict())
    load_model(folder.path)
    with pytest.raises(ConfigError, match=r"--unit 0: .* averaged into one; leave --unit out"):
        load_model(folder.path, unit=0)


def test_a_model_that_diverged_is_refused(tmp_path: Path) -> None:
    folder, settings, tokenizer = begun(tmp_path)
    weights = initial_model(settings, tokenizer).state_dict()
    name = list(weights)[-1]
    folder.write_weights(weights | {name: torch.full_like(weights[name], float("nan"))})
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {name} .*; lower optimizer\.lr"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("summary", "metrics", "status"),
    [
        ({"status": "failed", "rounds_completed": 0}, False, "failed"),
        ({"status": "failed", "rounds_completed": 2, "rounds_skipped": 2}, True, "failed"),
        ({"status": "failed", "rounds_completed": 2, "rounds_skipped": 1}, True, None),
        ({"status": "completed", "rounds_completed": 2}, True, None),
        (None, False, "not ended"),
        (None, True, None),
    ],
)
def test_a_model_that_no_round_has_trained_is_loaded_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    summary: dict[str, object] | None,
    metrics: bool,
    status: str | None,
) -> None:
    folder, settings, tokenizer = begun(tmp_path)
    folder.write_weights(initial_model(settings, tokenizer).state_dict())
    load_model(tmp_path)
    assert not caplog.messages  # no run has begun here: it may be a copy of the model alone
    with folder.locked():
        if metrics:
            folder.append_metrics({})
        if summary is not None:
            folder.write_summary(summary)
    load_model(tmp_path)
    warned = [
        f"(status: {status})" in line and "begin a new run" in line for line in caplog.messages
    ]
    assert warned == ([] if status is None else [True]), caplog.messages


@pytest.mark.parametrize("command", [("predict", "RUN", "Dienstag"), ("export", "RUN", "OUT")])
def test_predict_and_export_accept_the_number_of_a_unit(
    apart: tuple[Path, list[Tensors]], tmp_path: Path, command: tuple[str, ...]
) -> None:
    places = {"RUN": str(apart[0]), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in command]
    without = CliRunner().invoke(app, words).exception
    assert isinstance(without, ConfigError)
    assert "--unit N" in str(without)
    result = CliRunner().invoke(app, [*words, "--unit", "1"])
    if command[0] == "predict":
        assert (result.exit_code, result.output.count("\n")) == (0, 1)
    else:  # the weights are found, but this model cannot be exported
        assert "not one of transformers" in str(result.exception)


def test_the_files_of_a_model_follow_the_umask(tmp_path: Path) -> None:
    folder, settings, tokenizer = begun(tmp_path)
    before = os.umask(0o027)
    try:
        folder.write_weights(initial_model(settings, tokenizer).state_dict())
        folder.write_tokenizer(tokenizer)
        folder.write_base({})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").glob("*")}
    names = "base.json", "model.safetensors", "model.json", "tokenizer.json"
    assert modes == dict.fromkeys(names, 0o640)


@pytest.mark.parametrize(("name", "message"), [("nowhere", "no such folder"), ("", "config.yaml")])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_the_saved_choices_are_those_of_hydras_groups(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", ["strategy=random"])
    folder = RunFolder(tmp_path / "run")
    folder.write_config(settings)
    found = json.loads((folder.path / "choices.json").read_text())
    assert {"strategy": "random", "task": "dates", "channel": "edge"}.items() <= found.items()
    assert not [group for group in found if "/" in group or group == "experiment"]


def test_only_one_of_two_runs_that_begin_together_continues(tmp_path: Path) -> None:
    """The second run opens the folder before the first writes, and locks it afterwards."""
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with first.locked():
        first.append_metrics({"round": 1})
        with pytest.raises(ConfigError, match="a run is writing here; choose another"):
            RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"), second.locked():
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == '{"round": 1}\n'


def test_a_failed_write_is_one_error_and_keeps_the_old_files(tmp_path: Path) -> None:
    folder, settings, tokenizer = begun(tmp_path)
    weights = initial_model(settings, tokenizer).state_dict()
    folder.write_weights(weights)
    folder.write_summary({"status": "completed"})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (
        lambda: folder.write_weights({name: 2 * each for name, each in weights.items()}),
        lambda: folder.write_summary({"status": "x" * 200}),
        lambda: folder.append_metrics({"round": "1" * 200}),
    ):
        with full_disk(), pytest.raises(StorageError, match=r"cannot be written \(.+\); make room"):
            write()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} <= {"metrics.jsonl"}


@pytest.mark.parametrize(
    ("resumed", "begins", "ends"),
    [(False, "hydra.run.dir=", "choose another"), (True, "", "make it writable, or resume a copy")],
)
def test_a_read_only_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, begins: str, ends: str
) -> None:
    """Root may write in any folder of a file system that is not read-only."""
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(30, "Read-only file system")))
    fault = re.escape(f"{begins}{tmp_path}: cannot be written (Read-only file system); {ends}")
    with pytest.raises(ConfigError, match=f"^{fault}$"):
        RunFolder(tmp_path, resumed)


def test_a_folder_whose_path_is_not_utf_8_is_refused_before_training(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ConfigError, match=r"cannot be written \('utf-8' codec.*; choose another"):
        RunFolder(folder)


def test_the_error_reports_that_the_runs_folder_was_moved(tmp_path: Path) -> None:
    folder, _, _ = begun(tmp_path / "run")
    folder.path.rename(tmp_path / "moved")
    with pytest.raises(
        StorageError, match=r"No such file.*; the run's folder was moved or removed"
    ):
        folder.append_metrics({"round": 1})


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("config.yaml", "model/model.safetensors"):
        killed = folder.replacing(name)
        killed.__enter__().write_bytes(b"half")
        assert len([*(tmp_path / name).parent.glob(".*")]) == 1
    with folder.locked():
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / ".lock"]


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be locked"), RunFolder(tmp_path).locked():
        pass


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.json", b"[" * 100_000),
        ("model.json", b'{"marks": {"pad": [1], "bos": "", "eos": ""}, "labels": []}'),
        ("model.json", b'{"marks": {"pad": "a", "bos": "b", "eos": "c"}, "labels": []}'),
        ("model.json", b"\xff"),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_damaged_tokenizer_gives_an_error_of_one_line(
    apart: tuple[Path, list[Tensors]], file: str, content: bytes
) -> None:
    (apart[0] / "model" / file).write_bytes(content)
    with pytest.raises(ConfigError, match=file) as caught:
        load_model(apart[0], unit=0)
    assert "\n" not in str(caught.value)


def test_weights_of_an_impossible_shape_are_refused(apart: tuple[Path, list[Tensors]]) -> None:
    (apart[0] / WEIGHTS).write_bytes(without_elements(2**63))
    with pytest.raises(ConfigError, match="not the weights of this run's model"):
        load_model(apart[0], unit=0)


def test_no_more_blocks_are_built_than_have_saved_weights(
    apart: tuple[Path, list[Tensors]],
) -> None:
    """A wrong number in a configuration must not fill the memory."""
    config = apart[0] / "config.yaml"
    text = config.read_text()
    changed = re.sub(r"num_blocks: \d+", "num_blocks: 1000000000", text)
    assert changed != text
    config.write_text(changed)
    with pytest.raises(ConfigError, match=r"tensors for 1000000000 blocks"):
        load_model(apart[0], unit=0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (WEIGHTS, lambda old: old[:-4096] + bytes(4096), "restore the file, or train again"),
        (
            "config.yaml",
            lambda old: old.replace(b"heads: 2", b"heads: 4"),
            "num_heads is 4, was 2 when",
        ),
        ("model/tokenizer.json", lambda old: old.replace(b'"a":67,"b":68', b'"a":68,"b":67'), ""),
        ("model/model.json", lambda old: old.replace(b'"eos": "</s>"', b'"eos": "<s>"'), ""),
        ("model/base.json", lambda _: b'{"x": "y"}', "x is y, was None when"),
    ],
)
def test_what_has_changed_since_the_weights_were_written_is_refused(
    apart: tuple[Path, list[Tensors]], name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    """Weights of an earlier version have no record, and are accepted."""
    run_dir, weights = apart[0], apart[0] / WEIGHTS
    load_model(run_dir, unit=0)
    (run_dir / name).write_bytes(change((run_dir / name).read_bytes()))
    with pytest.raises(ConfigError, match=rf"{name}: .* when the run wrote .*; restore") as caught:
        load_model(run_dir, unit=0)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    if name != "model/base.json":
        save_file(load_file(weights), weights)
        load_model(run_dir, unit=0)
