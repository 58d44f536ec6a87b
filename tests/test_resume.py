"""A resumed run equals an uninterrupted one to the last bit."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from federated import TINY, rewritten
from flwr.app import Context, Message, RecordDict
from resumed import SMALL, World, differing, outcome, tensors
from run_files import rounds_of, summary_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from test_chosen_heads import turning
from typer.testing import CliRunner

from client_app import control_unit, node
from client_app.app import app as units
from collapipe.cli.app import app
from server_app.checkpoints.folder import CheckpointFolder


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["optimizer.name=adamw"], marks=pytest.mark.thorough),
        pytest.param(
            ["optimizer.name=sgd", "optimizer.momentum=0.9", "server_optimizer=fedavgm"],
            marks=pytest.mark.thorough,
        ),
        ["server_optimizer=fedadam", "optimizer.state=reset"],
        # a head on each unit, and a privacy account
        ["privacy=private", "privacy.noise_seed=3", "privacy.clip_quantile=0.5"],
        pytest.param(  # one unit a round, so that the order of replies does not matter
            ["decoder.mode=shared", "channel.num_channels=1"], marks=pytest.mark.thorough
        ),
        pytest.param(
            ["adapter.last_blocks=1", "adapter=lora", "adapter.cache=true"],
            marks=pytest.mark.thorough,
        ),
        pytest.param(["compression=int8", "compression.gradient=int4"], marks=pytest.mark.thorough),
        pytest.param(  # precisions change in each round
            ["compression=auto", "channel.bandwidth_hz=[1e4,1e4]"], marks=pytest.mark.thorough
        ),
        pytest.param(
            ["compression.feedback=true", "compression=int4", "model.dropout=0"],
            marks=pytest.mark.thorough,
        ),
        [*turning(), "compression.feedback=true", "model.dropout=0"],
        pytest.param(list(turning()), marks=pytest.mark.thorough),
        pytest.param(["framework=pipeline", "channel.num_channels=1"], marks=pytest.mark.thorough),
        pytest.param(
            ["environment=mobile", "strategy=dssra", "cluster=edge", "channel.num_channels=1"],
            marks=pytest.mark.thorough,
        ),
        ["framework.train=false", "environment=mobile", "cluster=edge", "channel.num_channels=1"],
    ],
    ids=lambda overrides: overrides[0].replace("=", "_"),
)
def test_a_run_resumed_from_a_checkpoint_equals_the_uninterrupted_run(
    tmp_path: Path, overrides: list[str]
) -> None:
    world = World(tmp_path, *overrides)
    whole = world.run(tmp_path / "whole")
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    world.run(again, "000002")
    assert differing(tensors(again), tensors(whole)) == []
    assert outcome(again) == outcome(whole)
    assert outcome(whole)["latest"] == Path("000003")


def test_resume_removes_models_of_units_that_had_not_trained_by_the_checkpoint(
    tmp_path: Path,
) -> None:
    options = ["framework=pipeline", "strategy=random", "channel.num_channels=1", "seed=3"]
    run_dir = World(tmp_path, *options).run(tmp_path / "run")
    assert [line["units"] for line in rounds_of(run_dir)] == [[0], [0], [1]]
    shorter = World(tmp_path, *options, "federation.rounds=2").run(run_dir, "000001")
    models = sorted(path.name for path in (shorter / "model").glob("*.safetensors"))
    assert models == ["unit-0.safetensors"]


def test_a_unit_whose_devices_have_changed_is_logged_and_the_run_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The unit may lie, or its rows may have changed; the log names the unit."""

    def slower(message: Message, context: Context) -> Message:
        reply = units(message, context)
        state = message.metadata.message_type == "query.state"
        if state and context.node_config["partition-id"] == 1:
            with rewritten(reply) as decoded:
                decoded["state"] = decoded["state"].replace('"v":0.0', '"v":0.5')
        return reply

    world = World(tmp_path, "framework.train=false")
    run_dir = world.run(tmp_path / "run")
    world.run(run_dir, "000002", client=slower)  # type: ignore[arg-type]
    assert "unit 1: devices, rows or bits have changed" in caplog.text
    with gzip.open(run_dir / "requests.jsonl.gz", "rt") as file:
        *_, before, last = map(json.loads, file)
    times = [
        [unit["devices"][0]["time"]["v"] for unit in each["clusters"]] for each in (before, last)
    ]
    assert times == [[0.0, 0.0], [0.0, 0.5]]


@pytest.mark.parametrize(
    "overrides",
    [
        ["compression=int4", "compression.feedback=true", "model.dropout=0"],
        ["adapter=lora", "adapter.last_blocks=1", "adapter.cache=true"],
    ],
    ids=["activations", "stem"],
)
def test_units_with_fewer_rows_keep_the_state_of_the_remaining_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overrides: list[str],
) -> None:
    world = World(tmp_path, *overrides, "federation.keep=9")
    run_dir = world.run(tmp_path / "run")
    read = control_unit.load_shard
    monkeypatch.setattr(control_unit, "load_shard", lambda *of: read(*of).select(range(5)))
    node.cached_units.cache_clear()
    world.run(run_dir, "000002")
    node.cached_units.cache_clear()
    reports = rounds_of(run_dir)
    assert [(each["units"], each["failures"]) for each in reports] == [([0, 1], {})] * 3
    assert "the previous checkpoint" not in caplog.text
    before, after = (CheckpointFolder(run_dir).read(each).training for each in ("000002", "000003"))
    for unit, kept in after.units.items():
        assert kept.keys() == before.units[unit].keys()
        if "stem" in kept:
            assert len(kept["stem"]["kept"]) == 5
        else:
            assert max(kept["activations"]["rows"]) < 5


def test_a_resumed_run_suspends_failing_units_like_the_uninterrupted_run(tmp_path: Path) -> None:
    def failing(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            raise OSError("the battery is empty")
        return units(message, context)

    options = "channel.num_channels=1", "federation.num_units=3", "federation.rounds=8"
    world = World(tmp_path, *options, "federation.keep=8")
    whole = world.run(tmp_path / "whole", client=failing)  # type: ignore[arg-type]
    assert any(line["excluded"] for line in rounds_of(whole))
    for begin in "000003", "000004", "000005":
        again = shutil.copytree(whole, tmp_path / begin, symlinks=True)
        world.run(again, begin, client=failing)  # type: ignore[arg-type]
        assert outcome(again) == outcome(whole)


def test_a_unit_that_reports_no_number_is_excluded_from_the_resumed_run(tmp_path: Path) -> None:
    """The checkpoint has the unit's cluster, but the server cannot identify its node."""

    def mute(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            return Message(RecordDict(), reply_to=message)
        return units(message, context)

    world = World(tmp_path, "decoder.mode=control_unit", "strategy=all")
    run_dir = world.run(tmp_path / "run")
    world.run(run_dir, "000001", client=mute)  # type: ignore[arg-type]
    lines = rounds_of(run_dir)
    assert [line["units"] for line in lines] == [[0, 1], [0], [0]]
    assert [list(line["excluded"]) for line in lines] == [[], ["1"], ["1"]]


def test_the_last_round_always_has_a_checkpoint(tmp_path: Path) -> None:
    run_dir = World(tmp_path, "framework.train=false", "federation.checkpoint_every=2").run(
        tmp_path / "run"
    )
    assert CheckpointFolder(run_dir).names() == ["000002", "000003"]


def test_times_and_curves_continue_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorBoard sorts files of the same second by name, so it would read number 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    world = World(tmp_path, "framework.train=false")
    run_dir = world.run(tmp_path / "run")
    before_s = CheckpointFolder(run_dir).read("000002").progress.wall_s
    world.run(run_dir, "000002")
    lines = rounds_of(run_dir)
    assert [line["wall_s"] > before_s for line in lines] == [False, False, True]
    assert summary_of(run_dir)["wall_s"] > lines[2]["wall_s"]
    curves = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [point.step for point in curves.Scalars("round/clock_s")] == [1, 2, 3]


def test_resume_removes_partly_written_lines_and_checkpoints(tmp_path: Path) -> None:
    world = World(tmp_path, "decoder.mode=control_unit")
    whole = world.run(tmp_path / "whole")
    torn = shutil.copytree(whole, tmp_path / "torn", symlinks=True)
    for name in ("metrics.jsonl", "requests.jsonl.gz"):
        with (torn / name).open("ab") as file:
            file.write((whole / name).read_bytes()[:99])
    (torn / "checkpoints" / ".000004.partial").mkdir()
    (torn / "checkpoints" / ".000004.partial" / "state.json").write_text("{")
    world.run(torn, "000002")
    assert outcome(torn) == outcome(whole)
    assert not list((torn / "checkpoints").glob(".*"))


def test_a_completed_run_with_more_rounds_equals_a_run_that_began_with_them(tmp_path: Path) -> None:
    rare = ["federation.checkpoint_every=3", "federation.keep=2"]
    for name, rounds in (("short", 2), ("long", 4)):
        options = [*TINY, *SMALL, *rare, f"federation.rounds={rounds}", "decoder.mode=control_unit"]
        assert (
            not CliRunner()
            .invoke(app, ["run", *options, f"hydra.run.dir={tmp_path / name}"])
            .exit_code
        )
    more = ["resume", str(tmp_path / "short"), "federation.rounds=4"]
    assert not CliRunner().invoke(app, more).exit_code
    assert differing(tensors(tmp_path / "short"), tensors(tmp_path / "long")) == []
    short, long = (outcome(tmp_path / name) for name in ("short", "long"))
    line, row = (
        short["metrics"][1],
        short["rows"][1],
    )  # with a final checkpoint
    sent, sent_s = line.pop("checkpoint_bytes"), line.pop("checkpoint_s")
    assert sent > 0 and sent_s > 0
    line["bytes_up"] -= sent
    row["bytes_up"] = str(int(row["bytes_up"]) - sent)
    short["summary"]["bytes_up"] -= sent
    clocks = [
        [
            float(each.pop("clock_s"))
            for each in (*run["metrics"][1:], *run["rows"][1:], run["summary"])
        ]
        for run in (short, long)
    ]
    assert [clock_s - sent_s for clock_s in clocks[0]] == pytest.approx(clocks[1])
    assert short == long
