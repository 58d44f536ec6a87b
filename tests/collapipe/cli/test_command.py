"""The command line: exit statuses, one-line errors, and the files of a run."""

import errno
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from federated import TINY, play
from run_files import rounds_of, summary_of

import collapipe
from collapipe.cli import run
from collapipe.cli.run import unused_folder
from collapipe.config import Settings
from collapipe.deployment.server_folder import create
from collapipe.errors import ConfigError
from collapipe.tasks.translation import SequencePairs

Command = Callable[..., tuple[int, str, str]]
ALONE = "federation.num_units=1", "federation.rounds=1"


def test_every_command_reports_that_the_current_folder_is_gone(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in (["version"], ["report"], ["plan", "x.yaml"]):
        status, out, err = command(*arguments)
        assert (status, out, err.count("\n")) == (1, "", 1) and "current folder is gone" in err


def corpus(folder: Path, **files: bytes | None) -> Path:
    """A parallel corpus of two made-up pairs per split; ``train_de=None`` omits a file."""
    texts = {"de": b"ein Boot\nzwei Boote\n", "en": b"a boat\ntwo boats\n"}
    for split in ("train", "valid", "test"):
        for language, text in texts.items():
            content = files.get(f"{split}_{language}", text)
            if content is not None:
                (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["federation.round=3"], "unknown option federation.round; nearest: federation.rounds"),
        (["optimiser=sgd"], "unknown option optimiser; nearest: optimizer"),
        (["task=date"], "there is no conf/task/date.yaml; nearest: dates"),
        (["experiment=[fig11,nope]"], "there is no conf/experiment/nope.yaml; known: chinese_ner"),
        (["strategy=dates"], "known: all, delay_only, dssra, dssra_paper, even, loss_only, random"),
        (["nonsense"], "'nonsense': not an override KEY=VALUE; write nonsense=VALUE"),
        ([" "], "' ': not an override KEY=VALUE; write KEY=VALUE"),
        (["=3"], "=3: has no name; write KEY=VALUE"),
        (["data,root=a"], "data,root=a: has a comma in the name; write data.root=a"),
        (["seed.=3"], "seed.=3: not an override KEY=VALUE: "),
        (["pipeline.num_segments=7", "cluster.num_devices=8"], "more than model.num_blocks=6"),
        (["pipeline.num_segments=4"], "more than cluster.num_devices=3"),
        (["pipeline.num_micro_batches=65"], "more than batch_size=64"),
        (
            ["pipeline.num_micro_batches=65537", "batch_size=65537"],
            "pipeline.num_micro_batches=65537: must be at most 65536",
        ),
        (["batch_size=0"], "batch_size=0: must be at least 1"),
        (["batch_size=2.5"], "batch_size=2.5: must be a whole number"),
        (["federation.rounds=-1"], "federation.rounds=-1: must be at least 1"),
        (["federation.num_units=0"], "federation.num_units=0: must be at least 1"),
        (["federation.local_steps=x"], "federation.local_steps=x: must be a whole number"),
        (["federation.round_timeout_s=0"], "federation.round_timeout_s=0: must be above 0"),
        (["federation.round_timeout_s=inf"], "federation.round_timeout_s=inf"),
        (["cluster.num_devices=0"], "cluster.num_devices=0: must be at least 1"),
        (["optimizer.lr=nan"], "optimizer.lr=nan"),
        (["channel.gain_db=[-90,nan]"], "error: channel.gain_db[1]=nan: must be a number"),
        (["channel.gain_db=[x,x]"], "error: channel.gain_db[0]=x: must be a number\n"),
        (["optimizer.lr=0"], "optimizer.lr=0: must be above 0"),
        (["optimizer.clip_norm=-1"], "optimizer.clip_norm=-1: must be above 0"),
        (["model.num_blocks=0"], "model.num_blocks=0: must be at least 1"),
        (["model.dropout=1"], "model.dropout=1: must be below 1"),
        (["model.dim=63"], "model.dim=63: must be even and a multiple"),
        (["pipeline.schedule=zigzag"], "must be one of gpipe, one_f_one_b"),
        (["pipeline.dtype=int8"], "must be one of float32, float64"),
        (["strategy=random", "strategy.num_scheduled=0"], "strategy.num_scheduled=0"),
        (["data.partitioner.num_partitions=30"], "makes 30 shards, federation.num_units=3"),
        (["server_optimizer=fedadam", "server_optimizer.momentum=1"], "must be below 1"),
        (["federation.round_timeout_s=1e10"], "must be at most"),
        (["link.port=70000"], "link.port=70000: must be at most 65535"),
        ([*TINY, "link.host=192.0.2.1"], "cannot listen there"),
        (["seed=99999999999999999999"], "seed=99999999999999999999: must be below"),
        (["federation.clock=real", "framework.train=false"], "set federation.clock=modelled"),
        (["evaluation.where=units", "framework.train=false"], "evaluation.where=units: with"),
        (["channel.gain_db=" + "[" * 999 + "]" * 999], "nested too deeply"),
        (["task.max_length=1000000000"], "task.max_length=1000000000: must be at most 32768"),
        (["strategy._target_=no.such.Thing"], "no.such.Thing"),
        (["task.vocabulary=3"], "task.vocabulary=3: must be at least 259"),
        (
            ["pipeline.replicate_every=-1"],
            "error: pipeline.replicate_every=-1: must be at least 0 or one of auto",
        ),
        (["data.root=/no/such/folder"], "data.root=/no/such/folder: no such folder"),
        (["task.train_rows=2"], "2 rows"),
        (["data.root=."], "data.root=.: task=dates makes no use of it"),
        (["data=synthetic"], "data.synthetic=true: task=dates makes no use of it"),
        (["data.config=x"], "data.config=x: belongs to data.name"),
        (["optimizer.momentum=0.9"], "optimizer.name=adamw makes no use of it; set optimizer.mom"),
        (["optimizer=sgd", "optimizer.eps=1e-3"], "optimizer.eps=0.001: optimizer.name=sgd makes"),
        (["strategy=null"], "strategy=null: there is no conf/strategy/null.yaml; known: all, "),
        (["scheduler=dssra"], "unknown option scheduler; known: adapter, batch_size, channel, "),
        (["framework.partition=x"], "framework.partition=x: must be one of exact, shared, "),
        (["server_optimizer.lr=3"], "server_optimizer.name=fedavg makes no use of it"),
        (["server_optimizer=sgd", "server_optimizer.momentum=0.5"], "makes no use of it; set"),
        (["server_optimizer=fedavgm", "server_optimizer.beta2=0.5"], "makes no use of it; set"),
        (["server_optimizer.trim=0.2"], "server_optimizer.average=mean trims nothing"),
        (["privacy.delta=1e-6"], "privacy.noise_multiplier=0 adds no noise; set privacy.delta=1e"),
        (["model=huggingface", "model.family=t5", "+model.config={vocab_size: 9}"], "tokeniser"),
        (["privacy.noise_seed=1"], "adds no noise; set privacy.noise_seed=null"),
        (["privacy.threshold=0.7"], "privacy.secure_aggregation=false shares no keys"),
        (["adapter=lora", "adapter.cache_bytes=9"], "adapter.cache=false stores nothing"),
        (["decoder.mode=control_unit", "compression.gradient=int8"], "server sends no gradients"),
        (["strategy.error_budget=0.1", "compression=int8"], "nor compression.activation is auto"),
        (["data.tokenizer=bytes", "data.tokenizer_min_rows=2"], "bytes, is not made of the units'"),
        (["data.text_column=x"], "data.text_column=x: names a column of data.train_file or"),
        (["task.max_length=2"], "task.max_length=2: must be at least 3"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command: Command, tmp_path: Path, options: list[str], message: str
) -> None:
    status, out, err = command("run", *options, f"hydra.run.dir={tmp_path / 'run'}")
    assert status == 2, err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("train", ["true", "false"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["strategy.drift_weight=-1"],
            "strategy.drift_weight=-1.0: must be a number from 0 to 1e+18",
        ),
        (["strategy=random", "strategy.num_scheduled=0"], "strategy.num_scheduled=0: must be at"),
        (
            ["strategy=dssra_paper", "strategy.drift=paper", "strategy.drift_weight=0"],
            "strategy.drift_weight=0: drift paper needs a positive value",
        ),
        (
            ["strategy._target_=optim.baselines.EvenSplit"],
            "unknown option strategy.solver; EvenSplit has no options; leave it out; ~strategy.",
        ),
        (["strategy._target_=turnz.Turns"], "strategy._target_=turnz.Turns: "),
    ],
)
def test_an_invalid_strategy_leaves_no_folder_and_logs_nothing(
    command: Command,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: list[str],
    message: str,
    train: str,
) -> None:
    """The strategy is built before any other part of the run."""
    folder = tmp_path / "run"
    options = [*options, f"framework.train={train}", f"hydra.run.dir={folder}"]
    status, out, err = command("run", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")
    assert caplog.records == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"valid_en": None}, "lacks valid.en and valid.en.gz"),
        ({"train_en": b"a boat\n"}, "has 2 lines"),
        ({"test_de": b"ein Boot\nzwei \xff\n"}, "test.de.gz:2 is not UTF-8"),
        ({"train_de": b"", "train_en": b""}, "hold no text"),
    ],
)
def test_bad_data_is_reported_with_file_and_line(
    command: Command, tmp_path: Path, files: dict[str, bytes | None], message: str
) -> None:
    root = corpus(tmp_path, **files)
    status, _, err = command(
        "run",
        "task=multi30k",
        f"data.root={root}",
        f"hydra.run.dir={tmp_path / 'run'}",
        "federation.num_units=2",
    )
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_an_unwritable_output_folder_is_reported_before_training(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, out, err = command("run", f"hydra.run.dir={tmp_path / 'file' / 'run'}")
    assert status == 2
    assert "cannot be written" in err and "choose another" in err
    assert "round" not in out


def test_a_folder_with_a_run_in_it_is_not_overwritten(command: Command, finished: Path) -> None:
    before = (finished / "summary.json").read_bytes()
    status, _, err = command("run", *TINY, f"hydra.run.dir={finished}")
    assert status == 2
    assert "holds a run already" in err
    assert (finished / "summary.json").read_bytes() == before


def test_a_run_writes_its_summary_metrics_and_model(command: Command, tmp_path: Path) -> None:
    status, out, err = command("run", *TINY, "federation.eval_every=1", f"hydra.run.dir={tmp_path}")
    assert status == 0, err
    assert str(tmp_path) in out.replace("\n", "")
    summary = summary_of(tmp_path)
    assert summary["task"] == "dates"
    assert summary["metric"]["name"] == "BLEU"
    assert "version:" in summary["metric"]["signature"]
    assert summary["train_loss"].keys() == {"first", "last"}
    assert summary["rounds_completed"] == 2
    assert summary["samples"] == 2 * 2 * 3 * 6
    assert summary["wall_s"] > 0
    assert summary["bytes_up"] > summary["bytes_down"] > 0
    lines = rounds_of(tmp_path)
    assert [line["round"] for line in lines] == [1, 2]
    assert all(line["units"] == [0, 1, 2] and line["metric"]["value"] >= 0 for line in lines)
    took = lines[0]["seconds"]
    assert {"plan", "train", "aggregate", "evaluate", "unit/forward"} <= took.keys()
    assert 0 < took["unit/start"] < took["train"] - took["unit/forward"]
    assert (tmp_path / "config.yaml").read_text().startswith("# CollaPipe ")
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.safetensors",
        "base.json",
        "model.json",
        "tokenizer.json",
    }

    status, out, _ = command("predict", str(tmp_path), "Dienstag", "Mittwoch")
    assert (status, out.count("\n")) == (0, 2)


def test_prediction_reads_lines_of_standard_input(
    command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Dienstag\nMittwoch\n\n")))
    status, out, _ = command("predict", str(finished))
    assert (status, out.count("\n")) == (0, 3)


def test_prediction_without_a_run_is_a_one_line_error(command: Command, tmp_path: Path) -> None:
    status, _, err = command("predict", str(tmp_path / "nowhere"), "text")
    assert (status, err.count("\n")) == (2, 1)
    assert str(tmp_path / "nowhere") in err


def test_the_error_for_prediction_with_an_untrained_run_names_the_option(
    command: Command, tmp_path: Path
) -> None:
    assert command("run", *TINY, "framework.train=false", f"hydra.run.dir={tmp_path}")[0] == 0
    status, _, err = command("predict", str(tmp_path), "Dienstag")
    assert (status, err.count("\n")) == (2, 1)
    assert "framework.train=false" in err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, which tests must not change."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    play(folder)
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run's folder, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    "target",
    [
        "subprocess.Popen",
        "collapipe.flower.commands.subprocess.Popen",
        "collapipe.cli.simulation.run_simulation",
        "planted.Evil",
    ],
)
def test_prediction_runs_no_code_from_a_run_folder(
    command: Command, finished: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = finished / "trace"
    (finished / "planted.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(str(finished))
    text = (finished / "config.yaml").read_text()
    planted = text.replace("collapipe.tasks.dates.Dates", f"{target}\n  args: touch {trace}")
    assert planted != text
    (finished / "config.yaml").write_text(planted)
    status, _, err = command("predict", str(finished), "Dienstag")
    assert (status, err.count("\n")) == (2, 1)
    assert f"task._target_={target}: a saved run may name dataclasses of collapipe only" in err
    assert "--trust collapipe" not in err  # it would change nothing
    assert not trace.exists()


def test_a_trusted_module_that_is_not_installed_is_an_error(
    command: Command, finished: Path
) -> None:
    text = (finished / "config.yaml").read_text()
    (finished / "config.yaml").write_text(text.replace("collapipe.tasks.dates.", "mine.tasks."))
    status, _, err = command("predict", str(finished), "--trust", "mine", "Dienstag")
    assert (status, err.count("\n")) == (2, 1)
    assert "task._target_=mine.tasks.Dates: No module named 'mine'" in err


_CHAT = '{"source": "{{ texts }}", "special_tokens": {}, "day": "2026-01-01"}'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", "seed: ${oc.env:HOME}", "has references"),
        ("config.yaml", "a: &a [1, 2]\nb: [*a, *a]", "has references"),
        ("config.yaml", "a: [1", "not a saved configuration"),
        ("config.yaml", "- 1", "not a saved configuration"),
        ("model/tokenizer.json", "{}", "not a tokeniser"),
        ("model/model.json", '{"marks": {"pad": 3}, "labels": []}', "(marks.pad: must be a text"),
        ("model/model.json", f'{{"marks": {{}}, "labels": [], "chat": {_CHAT}}}', "chat template"),
        ("model/model.safetensors", "nonsense", "not the weights of this run's model"),
    ],
)
def test_a_damaged_run_folder_is_a_one_line_error(
    command: Command, finished: Path, file: str, content: str, message: str
) -> None:
    (finished / file).write_text(content)
    status, _, err = command("predict", str(finished), "Dienstag")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_prediction_does_not_need_the_training_data(command: Command, tmp_path: Path) -> None:
    (tmp_path / "data & more").mkdir()
    root = corpus(tmp_path / "data & more")
    options = ["task=multi30k", "task.vocabulary=300", f"data.root='{root}'", "batch_size=4"]
    tiny = [option for option in TINY if not option.startswith(("task.", "batch_size"))]
    status, _, err = command("run", *tiny, *options, *ALONE, f"hydra.run.dir={tmp_path / 'run'}")
    assert status == 0, err
    shutil.rmtree(root)
    assert command("predict", str(tmp_path / "run"), "ein Boot")[0] == 0


@pytest.mark.thorough
def test_a_sweep_runs_every_combination(command: Command, tmp_path: Path) -> None:
    options = ["seed=0,1", "strategy=all,random", f"hydra.sweep.dir={tmp_path}"]
    assert command("run", "-m", *TINY, *options)[0] == 0
    seeds = [summary_of(tmp_path / str(job))["seed"] for job in range(4)]
    assert seeds == [0, 0, 1, 1]


def test_a_sweep_continues_after_a_failed_job(command: Command, tmp_path: Path) -> None:
    options = ["optimizer=sgd", "optimizer.lr=1e30,0.1", f"hydra.sweep.dir={tmp_path}"]
    status, out, err = command("run", "-m", *TINY, *ALONE, *options)
    assert status == 1
    assert "1 of 2 jobs failed: 0" in err
    assert summary_of(tmp_path / "1")["status"] == "completed"
    rows = {line.split()[0]: line for line in out.splitlines() if "optimizer.lr=" in line}
    assert "failed" in rows["0"] and "completed" in rows["1"]
    assert f"report: collapipe report {tmp_path / '1'}\n" in out  # job 0 has no measurements
    (tmp_path / "7" / "checkpoints").mkdir(parents=True)  # of a larger sweep that was killed
    before = sorted(tmp_path.rglob("*"))
    status, out, err = command(
        "run", "-m", *TINY, *ALONE, "seed=1,2", f"hydra.sweep.dir={tmp_path}"
    )
    assert (status, out) == (2, "") and f"hydra.sweep.dir={tmp_path}: holds 2 runs already" in err
    assert err.endswith(f"collapipe resume {tmp_path / '7'}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_sweep_shows_the_state_of_all_jobs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ConfigError("wrong"), KeyboardInterrupt
    monkeypatch.setattr(run, "run_job", Mock(side_effect=ends))
    options = "seed=1,2,3", f"hydra.sweep.dir={tmp_path}"
    _, out, _ = command("run", "-m", *TINY, *options)
    rows = [line.split()[2:] for line in out.splitlines() if line[:1].isdigit()]
    assert rows == [["failed"], ["not", "begun"], ["not", "begun"]]


def test_a_sweep_shows_a_users_strategy_and_marks_clocks_without_uploads(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "conf" / "strategy" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("_target_: optim.baselines.EvenSplit\n")
    monkeypatch.chdir(tmp_path)
    options = [*TINY, *ALONE, "framework.train=false", "strategy=mine,random", "seed=3"]
    status, out, _ = command("run", "-m", *options, f"hydra.sweep.dir={tmp_path / 'jobs'}")
    assert status == 0
    assert "job 0 of 0 … 1: strategy=mine\n" in out
    rows = [line for line in out.splitlines() if "strategy=" in line and "completed" in line]
    assert ["uploads not counted" in each for each in rows] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run", "seed=0,1"], "seed=0,1: several values need -m: collapipe run -m seed=0,1"),
        (["run", "strategy=even,random"], "strategy=even,random: several values need -m: "),
        (["run", "-m", "strategy=even,", "random"], "strategy=even,: ends in a comma; write "),
    ],
)
def test_the_error_for_a_mistyped_sweep_shows_how_to_write_it(
    command: Command, options: list[str], message: str
) -> None:
    status, _, err = command(*options)
    assert (status, err.count("\n")) == (2, 1) and f"error: {message}" in err


BROKEN = """
import json
from dataclasses import dataclass
@dataclass(frozen=True)
class Broken:
    def plan_round(self, request, rng):
        return json.loads("mine is broken")
"""


def test_an_error_in_a_users_class_is_one_line_with_file_and_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    own = "strategy=even", "strategy._target_=broken.Broken"
    status, _, err = command("run", *TINY, *own, f"hydra.run.dir={tmp_path / 'run'}")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("error: JSONDecodeError: Expecting value: ")
    assert "(broken.py, line 7); " in err
    sweep = "seed=0,1", f"hydra.sweep.dir={tmp_path / 'jobs'}"
    status, _, err = command("run", "-m", *TINY, *own, *sweep)
    assert (status, err.count("(broken.py, line 7)\n"), "Traceback" in err) == (1, 2, False)


def test_an_error_in_collapipes_own_code_is_a_traceback(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if a user's class called the function."""
    calling = BROKEN.replace("import json", "from optim.latency import batch_s")
    calling = calling.replace('json.loads("mine is broken")', "batch_s(None, 0.0)")
    (tmp_path / "calling.py").write_text(calling)
    monkeypatch.chdir(tmp_path)
    own = "strategy=even", "strategy._target_=calling.Broken"
    with pytest.raises(AttributeError, match="NoneType"):
        command("run", *TINY, *own, f"hydra.run.dir={tmp_path / 'run'}")


def test_a_sweep_checks_all_jobs_before_the_first(command: Command, tmp_path: Path) -> None:
    status, _, err = command("run", "-m", *TINY, "seed=0,-1", f"hydra.sweep.dir={tmp_path / 's'}")
    assert (status, err.count("\n")) == (2, 1)
    assert "seed=-1" in err
    assert not (tmp_path / "s").exists()


def test_a_sweep_is_submitted_with_the_units_of_the_servers_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU in the options need not exist on this machine, because the app runs elsewhere."""
    folder = create(tmp_path / "federation", list("abcde"), "127.0.0.1", 9, 10)
    submitted = list[Settings]()
    monkeypatch.setattr(run, "_run_deployed", lambda settings, resume: submitted.append(settings))
    where = "runtime=deployment", f"runtime.federation={folder.root}"
    needed = "federation.min_units=5", "server.torch_device=cuda:99"
    sweep = "seed=1,2", f"hydra.sweep.dir={tmp_path / 'jobs'}"
    command("run", "-m", *where, *needed, *sweep)
    assert [(each.seed, each.federation.num_units) for each in submitted] == [(1, 5), (2, 5)]
    own = "batch_size=8", "pipeline.num_micro_batches=4,16"
    status, _, err = command("run", "-m", *where, *own, *sweep)
    assert (status, len(submitted)) == (2, 2) and "pipeline.num_micro_batches=16" in err


def test_options_are_read_from_a_file_or_from_a_runs_saved_configuration(
    command: Command, tmp_path: Path
) -> None:
    """Options on the command line override the file."""
    file, runs = tmp_path / "mine.yaml", [tmp_path / name for name in "abc"]
    file.write_text("seed: 7\nstrategy: random\nfederation: {rounds: 5}\n")
    untrained = "framework.train=false"
    for run_dir, options in [
        (runs[0], ["--config", str(file), *TINY, "federation.rounds=1", untrained]),
        (runs[1], ["--config", str(runs[0] / "config.yaml"), "batch_size=5"]),
    ]:
        status, out, err = command("run", *options, f"hydra.run.dir={run_dir}")
        assert status == 0, out + err
    summaries = [summary_of(run_dir) for run_dir in runs[:2]]
    assert [(each["seed"], each["rounds_completed"]) for each in summaries] == [(7, 1), (7, 1)]
    first, second = (yaml.safe_load((each / "config.yaml").read_text()) for each in runs[:2])
    assert first["strategy"]["_target_"] == "optim.baselines.RandomUnits"
    first["batch_size"] = 5
    assert first == second
    options = ["-m", "--config", str(runs[1] / "config.yaml"), "seed=1,2"]
    status, out, err = command("run", *options, f"hydra.sweep.dir={runs[2]}")
    assert status == 0, out + err
    sweep = [summary_of(runs[2] / job) for job in "01"]
    assert [(each["seed"], each["rounds_completed"]) for each in sweep] == [(1, 1), (2, 1)]
    status, _, err = command("run", "--config", str(tmp_path / "absent.yaml"))
    assert (status, err.count("\n")) == (2, 1)
    assert "absent.yaml: cannot be read (No such file or directory)" in err


def test_runs_started_in_the_same_second_get_different_folders(tmp_path: Path) -> None:
    folders = [unused_folder(tmp_path / "12-00-00", chosen=False) for _ in range(3)]
    assert [each.name for each in folders] == ["12-00-00", "12-00-00_2", "12-00-00_3"]


def test_train_and_load_from_python(tmp_path: Path) -> None:
    run_dir = collapipe.train([*TINY, *ALONE, f"hydra.run.dir={tmp_path / 'run'}"])
    settings, model, tokenizer = collapipe.load(run_dir)
    assert (run_dir, settings.federation.rounds) == (tmp_path / "run", 1)
    assert sum(each.numel() for each in model.parameters()) > 0
    assert tokenizer.vocabulary.size == 300


def test_a_run_in_the_same_process_reads_its_rows_again(tmp_path: Path) -> None:
    """In a notebook a file changes between two runs of the same options."""
    file, run_dir = tmp_path / "rows.csv", tmp_path / "run"
    options = [*TINY, *ALONE, f"data.train_file={file}", f"hydra.run.dir={run_dir}"]
    given = [each for each in options if not each.startswith("task.")]
    for count in (20, 30):
        file.write_text("source,target\n" + f"eins,one {count}\n" * count)
        shards = json.loads((collapipe.train(given) / "shards.json").read_text())["shards"]
        assert sum(each["rows"] for each in shards) == count * 8 // 10
        shutil.rmtree(run_dir)


@contextmanager
def _sigint_not_ignored() -> Iterator[None]:
    """Handle SIGINT as in a terminal.

    A test runner in the background ignores SIGINT, and child processes inherit this. ``preexec_fn``
    would fork, and gRPC's threads abort in a forked child.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_its_finished_rounds(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The files that the units keep between rounds are deleted."""
    (temporary := tmp_path / "temporary").mkdir()
    options = [*TINY, "federation.rounds=100000", f"hydra.run.dir={tmp_path}"]
    # Importing flwr sets GRPC_VERBOSITY here; in a user's terminal, the command sets it.
    terminal = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with _sigint_not_ignored():
        process = subprocess.Popen(
            [sys.executable, "-m", "collapipe", "run", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                **terminal,
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "TMPDIR": str(temporary),
            },
        )
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.05)
    assert len(list(temporary.glob("*/*.safetensors"))) == 3
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert err.decode().splitlines() == ["interrupted"]
    summary = summary_of(tmp_path)
    lines = metrics.read_text().splitlines()
    assert summary["status"] == "interrupted"
    assert summary["rounds_completed"] in (len(lines), len(lines) + 1)
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert list(temporary.glob("collapipe-*")) == []  # torch also has a folder there


def test_code_of_a_user_that_calls_sys_exit_is_an_error(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This also holds for status 0, which would mean success."""
    monkeypatch.setattr("optim.planned.verify_plan", Mock(side_effect=SystemExit(0)))
    status, _, err = command("run", *TINY, f"hydra.run.dir={tmp_path}")
    assert (status, err) == (1, "error: code of your own ended the command with sys.exit(0)\n")


def test_a_command_whose_output_is_closed_ends_silently(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = BrokenPipeError(errno.EPIPE, "closed")
    monkeypatch.setattr("collapipe.cli.status.show_status", Mock(side_effect=closed))
    assert command("status", "outputs") == (1, "", "")


def test_a_diverging_run_ends_with_status_1_and_one_line(command: Command, tmp_path: Path) -> None:
    status, _, err = command(
        "run", *TINY, "optimizer=sgd", "optimizer.lr=1e30", f"hydra.run.dir={tmp_path}"
    )
    assert (status, err.count("\n")) == (1, 1)
    assert "the loss is" in err and "round 1" in err


def test_control_characters_in_predictions_and_paths_are_not_printed(
    command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels and file names from another person may contain any characters."""
    monkeypatch.setattr(SequencePairs, "decode", lambda *rest: ["\x1b[31mrot\nund  mehr"])
    assert command("predict", str(finished), "text")[:2] == (0, " [31mrot und  mehr\n")
    status, _, err = command("predict", f"{finished}\x1b[31m\n", "text")
    assert (status, err.count("\n"), "\x1b" in err) == (2, 1, False)


def test_the_command_line_starts_without_matplotlib_scipy_and_hydra() -> None:
    code = (
        "import sys, collapipe.cli.app; print(*{'matplotlib', 'scipy', 'hydra'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip() == ""
