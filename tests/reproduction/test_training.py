"""Figures that train: the runs that they start, the values read from them, and their claims."""

import csv
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from round_report import round_report
from sections import optimizer_settings

from collapipe import __version__, config
from collapipe.cli.app import child_command
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.models.part import Optimizer, clip_scale
from collapipe.report import ClusterCost, RoundCost, Score
from collapipe.runs.evidence import Interval
from collapipe.runs.folder import RunFolder
from collapipe.runs.reading import Run, Summary
from reproduction import fig06, training
from reproduction.command import shown
from reproduction.fig09_fig10 import FIG09, FIG10, summed
from reproduction.figure import PaperFigure, above
from reproduction.learning_curves import learning_curve
from reproduction.training import Experiment, Job, Training, data_folder

ROUNDS, EVERY = 8, 2
HELD_OUT = Experiment("fig09", "multi30k", "full_transformer")
Command = Callable[..., tuple[int, str, str]]


def made_run(
    *, name: str = "BLEU", gain: float = 1.0, round_s: float = 10.0, upload_s: float = 5.0
) -> Run:
    """A run with a loss of 1/t and a metric that rises by ``gain`` a round.

    Cluster 1 is twice as fast as cluster 0.
    """
    lines = tuple(
        round_report(
            number,
            units=(0, 1),
            samples=1,
            wall_s=1.0,
            train_loss=1 / number,
            cost=RoundCost(round_s + upload_s, (_cost(0, round_s), _cost(1, round_s / 2))),
            clock_s=(round_s + upload_s) * number,
            evaluation_loss=0.5 / (gain or 1) if number % EVERY == 0 else None,
            metric=Score(name, gain * number) if number % EVERY == 0 else None,
        )
        for number in range(1, ROUNDS + 1)
    )
    test = Score(name, gain * ROUNDS)
    summary = Summary("completed", metric=test, test_loss=0.5 / (gain or 1), wall_s=3.0)
    tree = {"federation": {"num_units": 2, "rounds": ROUNDS, "clock": "modelled"}, "seed": 0}
    return Run(Path("made-up"), "1", "", tree, lines, summary, {}, {})


def _cost(unit: int, pipeline_s: float) -> ClusterCost:
    return ClusterCost(unit, pipeline_s, 5.0, 0.0, {}, pipeline_s + 5.0)


class Made(Training):
    """Returns made-up runs at once.

    PipeLine learns half as fast. VanillaFL has slower devices and shorter uploads. Each seed adds a
    tenth to the gain.
    """

    def runs(self, jobs: Sequence[Job]) -> Mapping[Job, Run]:
        return {job: self._made(job) for job in jobs}

    def _made(self, job: Job) -> Run:
        vanilla = job.variant == "vanilla_fl"
        metric = {"chinese_ner": "strict F1", "toutiao15": "accuracy"}.get(
            job.experiment.data, "BLEU"
        )
        gain = (1 + job.seed / 10) * (0.5 if job.variant == "pipeline" else 1)
        gain += 0.1 * (job.variant.startswith("s2-m2-") and job.variant.endswith("dropout0.1"))
        scale = 0.01 if metric != "BLEU" else 1.0
        return made_run(
            name=metric,
            gain=scale * gain,
            round_s=20.0 if vanilla else 10.0,
            upload_s=0.0 if vanilla else 30.0,
        )


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path, tmp_path / "runs", False)


def test_seconds_are_the_slowest_clusters() -> None:
    found = learning_curve(made_run(round_s=10.0, upload_s=5.0))
    assert found.devices_s.tolist() == [10.0 * t for t in range(1, ROUNDS + 1)]
    assert found.clock_s.tolist() == [15.0 * t for t in range(1, ROUNDS + 1)]
    assert found.points("validation", "rounds")[0].tolist() == [2, 4, 6, 8]
    assert found.points("validation", "clock_s")[0].tolist() == [30, 60, 90, 120]


def test_a_curve_is_linear_between_evaluations() -> None:
    curve = learning_curve(made_run())
    assert curve.at("validation", "rounds", 5.0) == pytest.approx(5.0)
    assert curve.at("validation", "devices_s", 50.0) == pytest.approx(5.0)
    assert curve.at("validation", "rounds", 100.0) == ROUNDS


def test_an_accuracy_is_shown_in_percent_and_bleu_is_not() -> None:
    assert learning_curve(made_run(name="accuracy", gain=0.01)).test == pytest.approx(ROUNDS)
    assert learning_curve(made_run(name="BLEU", gain=2)).test == 2 * ROUNDS
    assert (learning_curve(made_run(name="accuracy")).unit, learning_curve(made_run()).unit) == (
        "%",
        "",
    )


def test_a_row_has_empty_cells_for_values_that_were_not_measured() -> None:
    found = list(learning_curve(made_run(gain=2.0)).rows())
    assert found[0] == (1, 10.0, 15.0, 1.0, "", "BLEU", "")
    assert found[1] == (2, 20.0, 30.0, 0.5, 0.25, "BLEU", 4.0)


@pytest.mark.parametrize("lack", ["summary", "unit"])
def test_an_incomplete_run_is_named(lack: str) -> None:
    whole = made_run()
    lines = (*whole.rounds[:-1], dataclasses.replace(whole.rounds[-1], units=(1,)))
    poor = (
        dataclasses.replace(whole, summary=None)
        if lack == "summary"
        else dataclasses.replace(whole, rounds=lines)
    )
    with pytest.raises(ConfigError, match="made-up: "):
        learning_curve(poor)


def test_frameworks_that_learn_alike_differ_only_in_seconds(made: Made) -> None:
    found = fig06.FIGURE.evidence((0, 1, 2), made)
    claims = {claim.text: claim for claim in found.claims}
    rounds, devices, uploads = fig06.AXES.values()
    assert claims[f"BLEU above VanillaFL's, {rounds}"].ours.mean == 0
    # On devices, CollaPipe ends after 80 s, when VanillaFL has done half of its rounds. With
    # uploads, VanillaFL ends after 160 s, when CollaPipe has done half of its rounds.
    assert claims[f"BLEU above VanillaFL's, {devices}"].ours.mean == pytest.approx(100)
    assert claims[f"BLEU above VanillaFL's, {uploads}"].ours.mean == pytest.approx(-50)
    for axis in fig06.AXES.values():
        assert claims[f"BLEU above PipeLine's, {axis}"].ours.mean == pytest.approx(100)
        assert claims[f"accuracy above TITANIC's, {axis}"].ours.mean == 0
    assert not any(claim.agrees for claim in found.claims if "VanillaFL" in claim.text[:25])
    lead = {axis: claims[_early(axis)] for axis in fig06.AXES.values()}
    assert lead[devices].ours.mean > 0
    assert lead[uploads].ours.mean < 0
    assert (lead[devices].agrees, lead[uploads].agrees) == (True, False)


def _early(axis: str) -> str:
    return f"NER's training loss below VanillaFL's in the first quarter, {axis}"


def test_equal_losses_are_not_a_lead(made: Made) -> None:
    claims = {claim.text: claim for claim in fig06.FIGURE.evidence((0, 1), made).claims}
    same = claims[_early(fig06.AXES["rounds"])]
    assert same.ours.mean == 0
    assert not same.agrees


def test_a_lead_below_the_least_difference_does_not_agree() -> None:
    for low, agrees in ((0.0, False), (0.09, False), (0.11, True)):
        claim = above("a lead", "leads", Interval(0.2, low, 0.3), "points", 0.1)
        assert claim.agrees == agrees


def test_a_number_without_a_unit_is_shown_with_three_decimals() -> None:
    assert shown(Interval(1.25, 0.5, 2.0), "%") == "1.2 (0.5 … 2.0) %"
    assert shown(Interval(0.1234, 0.0, 0.2), "") == "0.123 (0.000 … 0.200)"
    assert shown(Interval(1.0, None, None), "s") == "1.0 s"


def test_a_gain_over_a_metric_of_zero_is_an_error(made: Made) -> None:
    same = {
        ("translation", name): learning_curve(made_run(gain=0.0 if name == "titanic" else 1.0))
        for name in fig06.FRAMEWORKS
    }
    with pytest.raises(RoundFailedError, match=r"^TITANIC: BLEU 0\b"):
        fig06.gain_percent([same], "translation", "titanic", "rounds")


def test_findings_have_the_largest_differences(made: Made) -> None:
    found = {each.text: each.ours.mean for each in fig06.FIGURE.evidence((0, 1), made).findings}
    text = "translation: largest difference of validation BLEU from {} in any round"
    assert found[text.format("VanillaFL")] == 0
    assert found[text.format("PipeLine")] == pytest.approx(np.mean([4.0, 4.4]))
    text = "translation: validation loss below {}'s, " + fig06.AXES["rounds"]
    assert found[text.format("TITANIC")] == 0
    assert found[text.format("PipeLine")] == pytest.approx(np.mean([0.5, 0.5 / 1.1]))


@pytest.mark.parametrize("figure", [FIG09, FIG10])
def test_differences_are_taken_within_a_seed(figure: PaperFigure[Any], made: Made) -> None:
    found = figure.evidence((0, 1, 2), made)
    with_dropout = [claim for claim in found.claims if "dropout 0.1" in claim.text]
    without = [claim for claim in found.claims if "dropout 0:" in claim.text]
    assert len(with_dropout) == len(without) == 4  # the paper's two, and two of other readings
    for claim in with_dropout:  # a lead of 0.1 a round in each seed, although seeds differ by more
        assert claim.ours.ends == pytest.approx((0.1 * ROUNDS, 0.1 * ROUNDS))
        assert claim.agrees
    for claim in without:
        assert claim.ours.ends == (0, 0)
        assert not claim.agrees


def test_a_job_sets_the_number_of_segments_and_micro_batches() -> None:
    jobs = list[Job]()

    class Recorded(Made):
        def runs(self, requested: Sequence[Job]) -> Mapping[Job, Run]:
            jobs.extend(requested)
            return super().runs(requested)

    FIG09.evidence((0,), Recorded(Path(), Path(), False))
    assert len({(job.variant, job.seed) for job in jobs}) == len(jobs) == 14
    (one,) = (job for job in jobs if job.variant == "s6-m2-dropout0.1")
    assert set(one.overrides) == {
        "cluster.energy_j=1.0e6",
        "strategy=even",
        "~strategy.energy",
        "pipeline.num_segments=6",
        "pipeline.num_micro_batches=2",
        "model.dropout=0.1",
    }


def test_a_step_for_each_micro_batch_keeps_the_number_of_samples(tmp_path: Path) -> None:
    trainer = Training(None, tmp_path, False)
    (job,) = (each for name, each in FIG09.jobs(0).items() if name == (0.0, STEPPED))
    settings = config.load_overrides(trainer._overrides(job))
    assert (settings.batch_size, settings.federation.local_steps) == (32 // 8, 10 * 8)
    assert settings.pipeline.num_micro_batches == 1
    assert settings.optimizer.warmup_steps == 100 * 8


STEPPED = "S = 2, m = 8, a step each"


@pytest.mark.parametrize("size", [0.1, 10.0], ids=["free", "clipped"])
def test_summed_gradients_take_the_step_that_the_scaled_optimiser_takes(size: float) -> None:
    """For AdamW, the sum of m micro-batches' gradients gives the same step as their mean with ε and
    the clip norm divided by m."""
    m, settings = 8, optimizer_settings(eps=1e-2)
    given = config.load_overrides(["pipeline.num_micro_batches=8", "optimizer.eps=1e-2"])
    eps, norm = (float(option.split("=")[1]) for option in summed(given))
    scaled = optimizer_settings(eps=eps, clip_norm=norm)
    means = [size * torch.randn(5, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    ends = []
    for options, factor in ((settings, m), (scaled, 1)):
        weights = torch.nn.Parameter(torch.zeros(5))
        optimizer = Optimizer(options, torch.nn.ParameterList([weights]))
        for mean in means:
            gradient = factor * mean
            weights.grad = gradient * clip_scale(
                [float(gradient.square().sum())], options.clip_norm
            )
            optimizer.step(0.1)
        ends.append(weights.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("figure", "runs"),
    [
        ("fig06", 12),
        ("fig06_users", 2),
        pytest.param("fig09", 14, marks=pytest.mark.thorough),
        pytest.param("fig10", 14, marks=pytest.mark.thorough),
    ],
)
def test_a_figure_is_written(
    figure: str, runs: int, reproduce: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproduction.command.Training", Made)
    options = ("--data", tmp_path, "--output", tmp_path / "out")
    status, out, err = reproduce(figure, "--seeds", 2, *options)
    assert (status, err) == (0, "")
    assert figure in out
    found = json.loads((tmp_path / "out" / f"{figure}.json").read_text())
    assert found["basis"].startswith("learning is real")
    assert found["provenance"]["settings"]["sizes"] == "reduced"
    seeds = len(found["provenance"]["seeds"])
    assert found["provenance"]["settings"]["runs_wall_s"] == 3 * seeds * runs
    with (tmp_path / "out" / f"{figure}.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == ROUNDS * found["provenance"]["settings"]["runs"]
    text = "".join(ElementTree.parse(tmp_path / "out" / f"{figure}.svg").getroot().itertext())
    assert any(each in text for each in ("BLEU", "strict F1 [%]", "training loss"))


@pytest.mark.parametrize("figure", ["fig06", "all"])
def test_without_data_no_run_is_started(
    figure: str, reproduce: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLLAPIPE_DATA", raising=False)
    status, out, err = reproduce(figure, "--output", tmp_path / "out")
    assert (status, out) == (2, "")
    for name in ("multi30k", "chinese_ner", "toutiao15", "--data", "COLLAPIPE_DATA"):
        assert name in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_data_folder_is_set_by_option_or_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert data_folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.setenv("COLLAPIPE_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"^COLLAPIPE_DATA=.*/gone: "):
        data_folder(None)
    with pytest.raises(ConfigError, match=r"^--data=nowhere: "):
        data_folder(Path("nowhere"))


def test_the_started_command_is_collapipe(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        ended = subprocess.run(child_command("version"), stdout=log, stderr=log)
    assert (ended.returncode, __version__ in (tmp_path / "log").read_text()) == (0, True)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of runs, which are recorded instead of started; each leaves a finished run."""
    commands = list[list[str]]()

    def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        commands.append(list(command[len(child_command()) :]))
        if command[-1].startswith("hydra.run.dir="):
            folder = Path(command[-1].removeprefix("hydra.run.dir=").strip("'"))
            finish(folder, command[len(child_command()) + 1 : -1])
        else:
            end(Path(command[-1]))
        return subprocess.Popen(["/bin/true"])

    monkeypatch.setattr(training, "_start", start)
    monkeypatch.setattr(training, "_POLL_S", 0.01)
    return commands


def finish(run_dir: Path, overrides: Sequence[str]) -> None:
    run_dir.mkdir(parents=True)
    RunFolder(run_dir).write_config(config.load_overrides(overrides))
    end(run_dir)


def end(run_dir: Path, status: str = "completed") -> None:
    (run_dir / "summary.json").write_text(json.dumps({"status": status}))


@pytest.fixture
def place(tmp_path: Path) -> Training:
    (tmp_path / "data" / "multi30k").mkdir(parents=True)
    return Training(tmp_path / "data", tmp_path / "runs", False, lambda text: None)


JOBS = [Job(HELD_OUT, "a", 0, ("pipeline.num_segments=2",)), Job(HELD_OUT, "a", 1)]


def test_a_finished_run_is_not_repeated(place: Training, begun: list[list[str]]) -> None:
    found = place.runs(JOBS)
    assert len(begun) == 2
    assert begun[0][:4] == [
        "run",
        "experiment=[fig09]",
        f"data.root='{place.data}/multi30k'",
        "pipeline.num_segments=2",
    ]
    assert (found[JOBS[0]].seed, found[JOBS[1]].seed) == (0, 1)
    assert place.runs(JOBS)[JOBS[1]].seed == 1
    assert len(begun) == 2


def test_a_finished_run_with_other_options_is_refused(
    place: Training, begun: list[list[str]]
) -> None:
    place.runs(JOBS[:1])
    other = Job(HELD_OUT, "a", 0, ("pipeline.num_segments=3",))
    with pytest.raises(ConfigError, match=r"a-0: .*\bpipeline\.num_segments\b"):
        place.runs([other])
    assert len(begun) == 1


@pytest.mark.parametrize("saved", [True, False], ids=["checkpoint", "no checkpoint"])
def test_an_interrupted_run_resumes_or_starts_again_without_a_checkpoint(
    place: Training, begun: list[list[str]], saved: bool
) -> None:
    place.runs(JOBS[:1])
    run_dir = place.folder / "fig09" / "a-0"
    end(run_dir, "interrupted")
    (run_dir / "rest").touch()
    if saved:
        (run_dir / "checkpoints" / "5").mkdir(parents=True)
    place.runs(JOBS[:1])
    assert len(begun) == 2
    assert begun[1] == (["resume", str(run_dir)] if saved else begun[0])
    assert (run_dir / "rest").exists() == saved


def test_runs_with_the_papers_sizes_have_separate_folders(
    place: Training, begun: list[list[str]]
) -> None:
    Training(place.data, place.folder, True, lambda text: None).runs(JOBS[1:])
    assert begun[0][1] == "experiment=[fig09,full_transformer]"
    assert (place.folder / "fig09_full" / "a-1" / "summary.json").exists()


def test_an_experiment_with_synthetic_rows_needs_no_data(
    begun: list[list[str]], tmp_path: Path
) -> None:
    job = Job(Experiment("remark2", None, "full_transformer"), "a", 0)
    Training(None, tmp_path, False, lambda text: None).runs([job])
    assert begun[0][:3] == ["run", "experiment=[remark2]", "seed=0"]


def test_a_missing_data_set_is_named(place: Training, begun: list[list[str]]) -> None:
    other = Job(Experiment("fig10", "chinese_ner", "full_bert"), "a", 0)
    with pytest.raises(ConfigError, match=rf"^--data {place.data}: .*\bchinese_ner\b"):
        place.runs([*JOBS, other])
    assert begun == []


class Process:
    """A process that ends with a status after this number of polls."""

    alive = 0

    def __init__(self, looks: int, status: int = 0) -> None:
        self.looks, self.returncode, self.ended = looks, status, False
        Process.alive += 1

    def poll(self) -> int | None:
        self.looks -= 1
        if self.looks > 0:
            return None
        Process.alive -= 1
        return self.returncode

    def terminate(self) -> None:
        self.ended = True

    def wait(self) -> None:
        assert self.ended


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Process]]:
    """The started processes, by command: ``POLLS`` or ``POLLS:STATUS``."""
    started = dict[str, Process]()

    def start(command: Sequence[str], log: Path) -> Process:
        looks, _, status = command[0].partition(":")
        started[command[0]] = Process(int(looks), int(status or 0))
        assert Process.alive <= 2
        return started[command[0]]

    monkeypatch.setattr(training, "_start", start)
    monkeypatch.setattr(training, "_POLL_S", 0)
    monkeypatch.setattr(Process, "alive", 0)
    yield started


def test_two_processes_run_at_a_time(processes: dict[str, Process], tmp_path: Path) -> None:
    commands = {Job(HELD_OUT, text, 0): [text] for text in ("5", "1", "2", "4")}
    ended = [job.variant for job in training._finished(commands, lambda job: tmp_path)]
    assert ended == ["1", "2", "5", "4"]
    assert not any(process.ended for process in processes.values())


def test_a_failed_process_ends_the_others_and_its_error_is_raised(
    processes: dict[str, Process], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("round 1/2\nerror: data.root=x: no such folder\n")
    commands = {Job(HELD_OUT, text, 0): [text] for text in ("9", "1:2", "3")}
    with pytest.raises(RoundFailedError, match=f"^{log}: data.root=x: no such folder$"):
        list(training._finished(commands, lambda job: log))
    assert {text: process.ended for text, process in processes.items()} == {
        "9": True,
        "1:2": False,
    }


def test_an_interruption_ends_the_running_processes(
    processes: dict[str, Process], tmp_path: Path
) -> None:
    commands = {Job(HELD_OUT, text, 0): [text] for text in ("9", "1", "3")}
    jobs = training._finished(commands, lambda job: tmp_path)
    assert next(jobs).variant == "1"
    with pytest.raises(KeyboardInterrupt):
        jobs.throw(KeyboardInterrupt)
    assert processes["9"].ended


def test_the_output_of_a_process_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "log"
    code = "import os, sys; print(os.getsid(0) == os.getpid(), flush=True); sys.exit('no')"
    process = training._start([sys.executable, "-S", "-c", code], log)
    assert process.wait() == 1
    assert log.read_text().split() == ["True", "no"]
