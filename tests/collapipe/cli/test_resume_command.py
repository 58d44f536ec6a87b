"""``collapipe resume``: the runs that it refuses, with reasons and alternatives."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import grid_of, settings_of, train
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from resumed import SMALL, World
from run_files import summary_of

from client_app.app import app as units
from collapipe.cli import resume
from collapipe.cli.resume import resume_run
from collapipe.errors import ConfigError, StorageError
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import load_model
from collapipe.runs.reading import how_to_go_on
from collapipe.wire import records
from server_app.checkpoints import resumption
from server_app.checkpoints.folder import CheckpointFolder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A set-up that creates runs of three rounds."""
    return World(tmp_path_factory.mktemp("world"), "decoder.mode=control_unit")


@pytest.fixture(scope="module")
def complete(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of three rounds, with a checkpoint of each round."""
    return world.run(tmp_path_factory.mktemp("complete") / "run")


@pytest.fixture
def run_dir(complete: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's folder, which a test may change."""
    return shutil.copytree(complete, tmp_path / "run", symlinks=True)


def refusal(run_dir: Path, *overrides: str, name: str | None = None) -> str:
    """The one-line error of ``resume``. Asserts that no file in the folder has changed."""
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
    ("override", "message"),
    [
        ("optimizer.lr=0.5", "optimizer.lr was 0.003, is 0.5;"),
        ("model.dim=32", "model.dim was 16, is 32;"),
        ("task.max_length=41", "task.max_length was 40, is 41;"),
        ("task.vocabulary=301", "task.vocabulary was 300, is 301;"),
        ("compression=int8", 'compression.upload was "float32", is "int8";'),
        ("strategy=random", "more differ; set these as before, or begin a new run"),
        ("+task.extra=1", "unknown option task.extra"),
        (
            "task=ner",
            "task=ner does not fit the run's other options (unknown option task.train_rows",
        ),
    ],
)
def test_resuming_with_options_that_change_the_training_is_refused(
    run_dir: Path, override: str, message: str
) -> None:
    assert message in refusal(run_dir, override, "federation.rounds=4")


def test_the_error_for_a_complete_run_explains_how_to_train_longer(run_dir: Path) -> None:
    expected = (
        f"{run_dir}: completed after 3 rounds; to train longer, raise federation.rounds, such as "
        "federation.rounds=6"
    )
    assert refusal(run_dir) == expected
    assert refusal(run_dir, "seed=0", "federation.keep=1") == expected


def test_damaged_weights_are_made_again_from_the_last_checkpoint(
    run_dir: Path, world: World
) -> None:
    file = run_dir / "model/model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-400] + bytes(400))
    with pytest.raises(ConfigError) as raised:
        load_model(run_dir)
    way_out = f"rm -f {run_dir}/summary.json; collapipe resume {run_dir}"
    assert str(raised.value).endswith(way_out)
    (run_dir / "summary.json").unlink()
    world.run(run_dir, "000003")
    assert file.read_bytes() == sound


def test_another_folder_is_refused(run_dir: Path) -> None:
    message = refusal(run_dir, "hydra.run.dir=elsewhere", "federation.rounds=4")
    assert message == f"hydra.run.dir=elsewhere: has no effect; a resumed run stays in {run_dir}"


def test_the_inventory_may_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of devices which another ``collapipe up`` has started."""
    file, run_dir = tmp_path / "boxes.yaml", tmp_path / "run"
    cluster = "{name: home, devices: [{name: pi, chunk: {u: 0.1}}]}"
    file.write_text(f"batch_size: 4\nmodel: {{num_blocks: 2}}\nclusters: [{cluster}]\n")
    own = "federation.num_units=1", "federation.rounds=1", "cluster=file", f"cluster.file={file}"
    settings = settings_of(run_dir, [*(e for e in SMALL if "cluster." not in e), *own])
    train(grid_of(settings), settings)
    moved, started = file.rename(tmp_path / "moved.yaml"), list[object]()
    monkeypatch.setattr(resume, "start", lambda found, _: started.append(found.tree["cluster"]))
    with pytest.raises(ConfigError, match=r"boxes\.yaml: is gone; .* add cluster\.file=FILE"):
        resume_run(run_dir, ["federation.rounds=2"], None, [])
    resume_run(run_dir, ["federation.rounds=2", f"cluster.file={moved}"], None, [])
    assert started == [settings.tree["cluster"] | {"file": str(moved)}]


def test_fewer_rounds_than_at_the_checkpoint_are_refused(run_dir: Path) -> None:
    assert refusal(run_dir, "federation.rounds=2").startswith(
        f"federation.rounds=2: the checkpoint of {run_dir} is of round 3; set at least 3, or choose"
    )


def test_a_resume_that_finds_no_room_leaves_the_complete_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("model/tokenizer.json: cannot be written (No space left on device)")

    monkeypatch.setattr(RunFolder, "write_tokenizer", full)
    before = _content(run_dir)
    with pytest.raises(StorageError):
        resume_run(run_dir, ["federation.rounds=4"], None, [])
    assert _content(run_dir) == before


def test_weights_that_do_not_fit_the_model_are_refused_before_anything_is_changed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another version of a model's code."""
    monkeypatch.setattr(resumption, "trained_form", lambda *_: {"new": torch.zeros(2)})
    assert "this model's missing" in refusal(run_dir, "federation.rounds=4")


@pytest.mark.parametrize("name", ["shards.json", "account.json"])
def test_a_damaged_file_is_refused_before_anything_is_changed(name: str, run_dir: Path) -> None:
    (run_dir / name).write_text("{")
    assert str(run_dir / name) in refusal(run_dir, "federation.rounds=4")


def test_the_checkpoint_before_a_damaged_one_is_offered_and_works(run_dir: Path) -> None:
    state = run_dir / "checkpoints" / "000003" / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"round": 3', b'"round": 2'))
    message = refusal(run_dir)
    assert "000003: damaged, state.json was changed after it was written" in message
    assert message.endswith("to resume from the checkpoint before it, add --checkpoint 000002")
    resume_run(run_dir, [], "000002", [])
    assert CheckpointFolder(run_dir).read("000003").progress.round == 3


def test_a_new_run_is_suggested_if_there_is_no_earlier_checkpoint(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "000001" / "tensors.safetensors").unlink()
    message = refusal(run_dir, name="000001")
    assert "000001: damaged, tensors.safetensors cannot be read" in message
    assert message.endswith("there is no earlier checkpoint; begin a new run in another folder")


def test_another_runs_checkpoint_is_refused(run_dir: Path, tmp_path: Path) -> None:
    other = World(tmp_path / "other", "decoder.mode=control_unit", "seed=7").run(tmp_path / "seven")
    shutil.rmtree(run_dir / "checkpoints" / "000003")
    shutil.copytree(other / "checkpoints" / "000003", run_dir / "checkpoints" / "000003")
    message = refusal(run_dir)
    assert "000003: belongs to a run with other options: seed was 7, is 0;" in message
    assert message.endswith("add --checkpoint 000002")


def test_metrics_shorter_than_at_the_checkpoint_are_refused(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    message = refusal(run_dir)
    assert f"metrics.jsonl: has {len(lines[0] + lines[1])} bytes, had" in message
    assert message.endswith("add --checkpoint 000002")


@pytest.mark.parametrize("name", ["3", "000004", "../run/checkpoints/000003", "latest"])
def test_a_checkpoint_that_does_not_exist_is_refused(run_dir: Path, name: str) -> None:
    message = refusal(run_dir, name=name)
    assert message == f"--checkpoint {name}: {run_dir} has 000003, 000002, 000001"


def test_the_error_without_a_checkpoint_names_the_round_of_the_first(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert "has no checkpoint (the first follows round 1); start again" in refusal(run_dir)


@pytest.mark.parametrize("content", ["{", "7", '["a", 1]', None])
def test_a_folder_without_valid_overrides_is_refused(run_dir: Path, content: str | None) -> None:
    (run_dir / "overrides.json").unlink()
    if content is not None:
        (run_dir / "overrides.json").write_text(content)
    assert str(run_dir / "overrides.json") in refusal(run_dir)


def test_code_named_in_a_run_folder_is_not_imported(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder from another person may name any class."""
    (run_dir / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(run_dir)
    saved = json.loads((run_dir / "overrides.json").read_text())
    for option in ("strategy", "environment", "data.partitioner", "task", "+strategy.inner"):
        planted = [*saved, f"{option}._target_=planted.Plan"]
        (run_dir / "overrides.json").write_text(json.dumps(planted))
        message = refusal(run_dir)
        assert f"{option.lstrip('+')}._target_=planted.Plan: a saved run may name" in message
        assert message.endswith("add --trust planted (in Python: trusted=['planted'])")
    for target in (
        "flwr_datasets.partitioner.partitioner.Dataset",
        "collapipe.config.composing.Path",
    ):
        planted = [*saved, f"data.partitioner._target_={target}"]
        (run_dir / "overrides.json").write_text(json.dumps(planted))
        assert f"data.partitioner._target_={target}: a saved run may name" in refusal(run_dir)


def test_only_one_run_at_a_time_can_write_to_a_folder(run_dir: Path, world: World) -> None:
    with RunFolder(run_dir, resumed=True).locked():
        for attempt in (
            lambda: resume_run(run_dir, ["federation.rounds=4"], None, []),
            lambda: world.run(run_dir, "000002"),
        ):
            with pytest.raises(ConfigError, match=f"{run_dir}: a run is writing here"):
                attempt()


def test_a_changed_tokeniser_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "tokenizer_digest", lambda tokenizer: "other")
    assert "the tokeniser has changed" in refusal(run_dir, "federation.rounds=4")


def _no_answer(message: Message) -> Message:
    raise RuntimeError("no")


def _other_names(message: Message) -> Message:
    kept = {"a.b/c": {"weight": torch.zeros(1)}}
    return Message(records.pack_groups(kept), reply_to=message)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_no_answer, "RuntimeError: no (test_resume_command.py"),
        (_other_names, "which were not asked for"),
    ],
)
def test_a_unit_that_fails_to_send_its_state_is_logged_and_not_saved(
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    answer: Callable[[Message], Message],
    why: str,
) -> None:
    client = ClientApp()
    for name in ("rows", "state", "frozen"):
        client.query(name)(units)
    client.train()(units)

    @client.query("keep")
    def keep(message: Message, context: Context) -> Message:
        return answer(message) if context.node_config["partition-id"] else units(message, context)

    run_dir = world.run(tmp_path / "run", client=client)
    assert summary_of(run_dir)["status"] == "completed"
    checkpoints = CheckpointFolder(run_dir)
    assert [[*checkpoints.read(name).training.units] for name in checkpoints.names()] == [[0]] * 3
    lines = [each for each in caplog.messages if each.startswith("unit 1: ")]
    assert len(lines) == 3 and all(why in line for line in lines)
    world.run(run_dir, "000002")  # unit 1 starts without state, like a new unit
    assert summary_of(run_dir)["rounds_completed"] == 3


def test_a_changed_number_of_rounds_with_linear_decay_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "optimizer.decay=linear", "decoder.mode=control_unit")
    run_dir = world.run(tmp_path / "run")
    resume_run(run_dir, ["federation.rounds=4"], None, [])
    assert "decays to 0 in round 4; until now it decayed to 0 in round 3" in caplog.text
    saved = json.loads((run_dir / "overrides.json").read_text())
    assert [each for each in saved if each.startswith("federation.rounds")] == [
        "federation.rounds=4"
    ]


def test_a_folder_without_a_run_is_not_searched_for_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"{tmp_path}: not the folder of a run" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.csv",
        "config.yaml.partial",
        "model/model.safetensors.partial",
        ".writable",
        "tensorboard",
        "checkpoints",
        "checkpoints/000003",
    ],
)
def test_nothing_is_written_through_a_link(run_dir: Path, tmp_path: Path, name: str) -> None:
    """Links in a run folder from another person must not lead to other files."""
    elsewhere, place = tmp_path / "elsewhere", run_dir / name
    if place.is_dir():
        shutil.move(place, elsewhere)
        (elsewhere / "202401").mkdir()
    else:
        place.unlink(missing_ok=True)
        elsewhere.write_text("precious")
    place.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*")), elsewhere.is_file() and elsewhere.read_text()
    assert refusal(run_dir, "federation.rounds=4").startswith(f"{place}: is a link")
    with pytest.raises(ConfigError, match=f"{place}: is a link"):  # also without the command
        RunFolder(run_dir, resumed=True)
    assert before == (
        sorted(elsewhere.rglob("*")),
        elsewhere.is_file() and elsewhere.read_text(),
    )


def test_the_partial_link_of_a_killed_run_is_accepted(run_dir: Path) -> None:
    (run_dir / "checkpoints" / ".latest.partial").symlink_to("000003")
    resume_run(run_dir, ["federation.rounds=4"], None, [])
    assert CheckpointFolder(run_dir).names()[-1] == "000004"


def test_a_copy_that_replaced_links_by_folders_is_resumed(complete: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(complete, tmp_path / "run")
    assert "go on after round 3" in how_to_go_on(run_dir)
    resume_run(run_dir, ["federation.rounds=4"], None, [])
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / "latest").readlink() == Path("000004")
    assert {path.name for path in checkpoints.iterdir()} >= {"000003", "000004", "latest"}
    assert not list(checkpoints.glob(".*"))


def test_a_named_pipe_is_refused_without_waiting(run_dir: Path) -> None:
    state = run_dir / "checkpoints" / "000003" / "state.json"
    state.unlink()
    os.mkfifo(state)
    assert f"{state}: is a special file" in refusal(run_dir, "federation.rounds=4")


def _with(run_dir: Path, *options: str) -> None:
    saved = json.loads((run_dir / "overrides.json").read_text())
    (run_dir / "overrides.json").write_text(json.dumps([*saved, *options]))


@pytest.mark.parametrize(
    "options",
    [
        ["hydra.searchpath=[pkg://planted]", "++seed=0"],
        ["+hydra.callbacks.x._target_=planted.X"],
        ["hydra/launcher=basic"],
    ],
)
def test_options_of_hydra_in_a_run_folder_run_no_code(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    (run_dir / "planted").mkdir()
    (run_dir / "planted" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(run_dir)
    _with(run_dir, *options)
    message = refusal(run_dir, "federation.rounds=4")
    assert message.endswith("an option of Hydra, not of a run; remove it")


@pytest.mark.parametrize(
    "option",
    [
        "tracking.mlflow=http://example.org/${oc.env:SECRET}",
        r"tracking.mlflow=http://example.org/$\{oc.env:SECRET\}",
        "data.name='${oc.env:SECRET}'",
        r"data.name='\\${oc.env:SECRET}'",
    ],
)
def test_references_to_environment_variables_are_not_resolved(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    _with(run_dir, option)
    message = refusal(run_dir, "federation.rounds=4")
    assert "a reference, which is not followed here" in message
    assert "s3cret" not in message


def test_a_reference_that_a_later_value_overrides_is_allowed(run_dir: Path) -> None:
    """A run appends its resolved paths to the user's options."""
    saved = json.loads((run_dir / "overrides.json").read_text())
    options = ["federation.rounds=${oc.env:ROUNDS}", *saved, "federation.rounds=3"]
    (run_dir / "overrides.json").write_text(json.dumps(options))
    assert refusal(run_dir).endswith("federation.rounds=6")


@pytest.mark.parametrize(
    "option", ["tracking.mlflow='http://127.0.0.1:1'", "tracking={mlflow:'http://127.0.0.1:1'}"]
)
def test_metrics_are_not_sent_to_an_address_from_a_run_folder(run_dir: Path, option: str) -> None:
    _with(run_dir, option)
    message = refusal(run_dir, "federation.rounds=4")
    assert message.startswith("tracking.mlflow=http://127.0.0.1:1: the run's folder asks to send")
    resume_run(run_dir, ["federation.rounds=4", "tracking.mlflow=null"], None, [])
    assert not (run_dir / "mlflow_run_id").exists()


def _changed_state(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of checkpoint 3 and its digest, as an attacker would."""
    file = run_dir / "checkpoints" / "000003" / "state.json"
    state = json.loads(file.read_text())
    change(state)
    del state["sha256"]
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, **state}))


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("progress.sizes.metrics*csv", -1, "had -1 at the checkpoint"),
        ("progress.round", 2, "damaged, it contains round 2"),
        ("progress.round", -3, "damaged, it contains round -3"),
        ("configuration", 5, "it has no configuration"),
        ("configuration.seed", "\x1b[31m" * 10_000, "a run with other options: seed was"),
        ("progress.scheduler.queues", [0.0], "conditions of [2, 1, 2, 2] units"),
        ("progress.scheduler.roster.reported", [], "conditions of [0, 2, 2, 2] units"),
        ("progress.scheduler.environment.units", [], "conditions of [2, 2, 2, 0] units"),
        ("progress.scheduler.clock_s", float("nan"), "NaN is not a valid number"),
        ("progress.wall_s", float("inf"), "Infinity is not a valid number"),
        (
            "progress.scheduler.roster.reported",
            [{"kind": "\x1b[31m", "message": ""}, {"kind": "", "message": ""}],
            "not printable",
        ),
    ],
)
def test_a_forged_checkpoint_is_refused(
    run_dir: Path, place: str, value: object, expected: str
) -> None:
    def change(state: dict[str, Any]) -> None:
        *way, last = (key.replace("*", ".") for key in place.split("."))
        for key in way:
            state = state[key]
        state[last] = value

    _changed_state(run_dir, change)
    message = refusal(run_dir, "federation.rounds=4")
    assert expected in message
    assert len(message) < 1000
    assert message.endswith("add --checkpoint 000002")


def test_a_checkpoint_that_lacks_a_field_is_refused(run_dir: Path) -> None:
    _changed_state(run_dir, lambda state: state["progress"].pop("names"))
    assert "damaged, names is missing" in refusal(run_dir, "federation.rounds=4")


@pytest.mark.parametrize(
    "file", ["overrides.json", "checkpoints/000003/state.json", "summary.json"]
)
@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", '["+model.x=' + "[" * 3000 + '"]'])
def test_invalid_json_is_a_one_line_error(run_dir: Path, file: str, content: str) -> None:
    (run_dir / file).write_text(content)
    assert str(run_dir) in refusal(run_dir) or file == "overrides.json"
