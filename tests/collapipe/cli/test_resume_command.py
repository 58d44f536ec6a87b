"""``collapipe resume``: what it refuses, why, and what it offers instead."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from resumed import World

from client_app.app import app as units
from collapipe import wire
from collapipe.cli.resume import resume_run
from collapipe.errors import ConfigError
from collapipe.run_folder import RunFolder
from server_app.checkpoints import resumption
from server_app.checkpoints.file import CheckpointFolder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Runs of three rounds."""
    return World(tmp_path_factory.mktemp("world"), "decoder.mode=control_unit")


@pytest.fixture(scope="module")
def complete(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, with a checkpoint of each."""
    return world.run(tmp_path_factory.mktemp("complete") / "run")


@pytest.fixture
def run_dir(complete: Path, tmp_path: Path) -> Path:
    """The same run, to be done with as one likes."""
    return shutil.copytree(complete, tmp_path / "run", symlinks=True)


def refusal(run_dir: Path, *overrides: str, name: str | None = None) -> str:
    """What ``resume`` says; nothing in the folder has changed."""
    before = _content(run_dir)
    with pytest.raises(ConfigError) as raised:
        resume_run(run_dir, overrides, name, [])
    assert _content(run_dir) == before
    (line,) = str(raised.value).splitlines()
    return line


def _content(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.lr=0.5", "optimizer.lr was 0.003, is 0.5;"),
        ("model.dim=32", "model.dim was 16, is 32;"),
        ("task.max_length=41", "task.max_length was 40, is 41;"),
        ("task.vocabulary=301", "task.vocabulary was 300, is 301;"),
        ("compression=int8", 'compression.upload was "float32", is "int8";'),
        ("strategy=random", "more differ; leave these as they were, or begin a new run"),
        ("+task.extra=1", "unknown option task.extra"),
    ],
)
def test_a_run_that_would_learn_something_else_is_refused(
    run_dir: Path, override: str, says: str
) -> None:
    assert says in refusal(run_dir, override, "federation.rounds=4")


def test_a_complete_run_says_how_to_give_it_more(run_dir: Path) -> None:
    says = f"{run_dir}: completed after 3 rounds; to go on, give it more: federation.rounds=6"
    assert refusal(run_dir) == says
    assert refusal(run_dir, "seed=0", "federation.keep=1") == says


def test_rounds_that_are_over_stay(run_dir: Path) -> None:
    assert refusal(run_dir, "federation.rounds=2").startswith(
        f"federation.rounds=2: {run_dir} goes on after round 3; set at least 3, or choose"
    )


def test_the_checkpoint_before_a_damaged_one_is_offered_and_works(run_dir: Path) -> None:
    state = run_dir / "checkpoints" / "000003" / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"round": 3', b'"round": 2'))
    says = refusal(run_dir)
    assert "000003: damaged, state.json is not what was written" in says
    assert says.endswith("to go on from the one before it, add --checkpoint 000002")
    resume_run(run_dir, [], "000002", [])
    assert CheckpointFolder(run_dir).read("000003").progress.round == 3


def test_where_there_is_none_before_it_a_new_run_is(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "000001" / "tensors.safetensors").unlink()
    says = refusal(run_dir, name="000001")
    assert "000001: damaged, tensors.safetensors cannot be read" in says
    assert says.endswith("there is none before it: begin a new run in another folder")


def test_another_runs_checkpoint_is_refused(run_dir: Path, tmp_path: Path) -> None:
    other = World(tmp_path / "other", "decoder.mode=control_unit", "seed=7").run(tmp_path / "seven")
    shutil.rmtree(run_dir / "checkpoints" / "000003")
    shutil.copytree(other / "checkpoints" / "000003", run_dir / "checkpoints" / "000003")
    says = refusal(run_dir)
    assert "000003: of a run with other options: seed was 7, is 0;" in says
    assert says.endswith("add --checkpoint 000002")


def test_metrics_that_are_lost_are_missed(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    says = refusal(run_dir)
    assert f"metrics.jsonl: has {len(lines[0] + lines[1])} bytes, had" in says
    assert says.endswith("add --checkpoint 000002")


@pytest.mark.parametrize("name", ["3", "000004", "../run/checkpoints/000003", "latest"])
def test_a_checkpoint_that_is_not_there_is_refused(run_dir: Path, name: str) -> None:
    says = refusal(run_dir, name=name)
    assert says == f"--checkpoint {name}: {run_dir} has 000001, 000002, 000003"


def test_a_run_without_a_checkpoint_says_when_the_first_comes(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert "has no checkpoint yet (the first follows round 1); start again" in refusal(run_dir)


@pytest.mark.parametrize("content", ["{", "7", '["a", 1]', None])
def test_a_folder_of_no_run_is_refused(run_dir: Path, content: str | None) -> None:
    (run_dir / "overrides.json").unlink()
    if content is not None:
        (run_dir / "overrides.json").write_text(content)
    assert str(run_dir / "overrides.json") in refusal(run_dir)


def test_code_of_others_is_not_imported(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that somebody sent may name anything."""
    (run_dir / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(run_dir)
    saved = json.loads((run_dir / "overrides.json").read_text())
    for option in ("strategy", "environment", "data.partitioner", "task", "+strategy.inner"):
        planted = [*saved, f"{option}._target_=planted.Plan"]
        (run_dir / "overrides.json").write_text(json.dumps(planted))
        says = refusal(run_dir)
        assert f"{option.lstrip('+')}._target_=planted.Plan: a saved run may name" in says
        assert says.endswith("if you trust it, add --trust planted")
    for target in ("flwr_datasets.partitioner.partitioner.Dataset", "collapipe.config.Path"):
        planted = [*saved, f"data.partitioner._target_={target}"]
        (run_dir / "overrides.json").write_text(json.dumps(planted))
        assert f"data.partitioner._target_={target}: a saved run may name" in refusal(run_dir)


def test_a_folder_is_one_runs_at_a_time(run_dir: Path, world: World) -> None:
    with RunFolder(run_dir, resumed=True).locked():
        for attempt in (
            lambda: resume_run(run_dir, ["federation.rounds=4"], None, []),
            lambda: world.run(run_dir, "000002"),
        ):
            with pytest.raises(ConfigError, match=f"{run_dir}: a run is writing here"):
                attempt()


def test_rows_that_have_changed_are_noticed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "tokenizer_digest", lambda tokenizer: "other")
    assert "the training rows make another tokeniser" in refusal(run_dir, "federation.rounds=4")


def _no_answer(message: Message) -> Message:
    raise RuntimeError("no")


def _other_names(message: Message) -> Message:
    kept = {"a.b/c": {"weight": torch.zeros(1)}}
    return Message(wire.pack_kept(kept), reply_to=message)


@pytest.mark.parametrize(
    ("told", "why"),
    [(_no_answer, "no"), (_other_names, "keeps 'a.b/c', which no checkpoint can hold")],
)
def test_a_unit_that_does_not_tell_costs_a_checkpoint_and_no_more(
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    told: Callable[[Message], Message],
    why: str,
) -> None:
    odd = ClientApp()
    for name in ("state", "frozen"):
        odd.query(name)(units)
    odd.train()(units)

    @odd.query("keep")
    def keep(message: Message, context: Context) -> Message:
        return told(message) if context.node_config["partition-id"] else units(message, context)

    run_dir = world.run(tmp_path / "run", client=odd)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "completed"
    assert CheckpointFolder(run_dir).names() == []
    (line,) = [each for each in caplog.messages if each.startswith("round 2: ")]
    assert line.startswith("round 2: no checkpoint is written: unit 1")
    assert line.endswith(why)


def test_linear_rates_with_another_number_of_rounds_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "optimizer.decay=linear", "decoder.mode=control_unit")
    run_dir = world.run(tmp_path / "run")
    resume_run(run_dir, ["federation.rounds=4"], None, [])
    assert "rates go down to 0 in round 4, until here they did so for round 3" in caplog.text
    saved = json.loads((run_dir / "overrides.json").read_text())
    assert [each for each in saved if each.startswith("federation.rounds")] == [
        "federation.rounds=4"
    ]
