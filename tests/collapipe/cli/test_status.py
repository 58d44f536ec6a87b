"""``collapipe status``: the progress of a run, from the files that its folder has so far."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from made_run import (
    FAILED,
    SET_ASIDE,
    SKIPPED,
    made_lines,
    make_run,
    without_uploads,
    write_lines,
    write_summary,
)

from collapipe.cli.status import describe
from collapipe.report import DeviceReport
from collapipe.runs.folder import LOCK
from collapipe.runs.reading import read_run

Command = Callable[..., tuple[int, str, str]]
NOW_S = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an unfinished run after 12 of 20 rounds."""
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    (folder / "shards.json").unlink()
    write_lines(folder, list(made_lines(20))[:12])
    return folder


def status_of(folder: Path, age_s: float = 10.0) -> dict[str, str]:
    """The lines of the status, by name; the folder was last written ``age_s`` seconds ago."""
    for file in folder.rglob("*"):
        os.utime(file, (NOW_S - age_s, NOW_S - age_s), follow_symlinks=False)
    return dict(describe(read_run(folder), NOW_S))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, as a running run does."""
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_status_of_a_running_run(run: Path) -> None:
    with writing(run):
        lines, last = status_of(run), list(made_lines(20))[11]
    assert lines["run"] == "running, last written 10 s ago"
    assert lines["folder"] == str(run)
    done, left = lines["round"].split(", ", 1)
    assert done == "12 of 20"
    seconds = int(left.removeprefix("about ").split(" s left at ")[0])
    assert 8 * 3 < seconds < 8 * 4.2
    assert lines["train loss"] == f"{last['train_loss']:.4f} (round 12)"
    assert lines["BLEU"] == "50 (round 10), evaluation loss " + _loss(10)
    assert lines["clock"] == f"{last['clock_s']:.0f} s, modelled"
    assert lines["units"] == "4 of 4 scheduled units trained"


def test_devices_have_their_whole_names(run: Path) -> None:
    lines, names = list(made_lines(20))[:12], ("raspberry-pi-5-left", "raspberry-pi-5-right")
    reports = [asdict(DeviceReport(name, 3, *(1.0,) * 7)) for name in names]
    write_lines(run, [*lines[:-1], lines[-1] | {"devices": {"0": reports}}])
    shown = [text for label, text in describe(read_run(run), NOW_S) if label == "device"]
    assert shown == [f"{n} of unit 0: 3 blocks, computed 1.00 s, waited 1.00 s" for n in names]


def _loss(number: int) -> str:
    return f"{list(made_lines(20))[number - 1]['evaluation_loss']:.4f}"


@pytest.mark.parametrize("age_s", [0.0, 10_000.0])
def test_a_killed_run_is_recognised_by_its_free_lock(age_s: float, run: Path) -> None:
    """The operating system frees the lock of a killed process; a slow run still holds its lock."""
    with writing(run):
        assert status_of(run, age_s)["run"].startswith("running, last written ")
        assert " left at " in status_of(run, age_s)["round"]
    assert status_of(run, age_s)["run"].startswith("killed, last written ")
    assert status_of(run, age_s)["run"].endswith(": begin a new run")
    assert status_of(run, age_s)["round"] == "12 of 20"


def test_a_killed_run_with_a_checkpoint_names_the_command_that_resumes_it(run: Path) -> None:
    (run / "checkpoints" / "000010").mkdir(parents=True)
    spaced = run.rename(run.with_name("my run; rm"))
    assert status_of(spaced)["run"].endswith(f"collapipe resume '{spaced}'")


def test_status_before_the_first_round(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with writing(run):
        lines = status_of(run, 3)
    assert lines["run"] == "not started a round, last written 3 s ago"
    assert lines["round"] == "0 of 20"


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ("completed", None, "completed"),
        ("failed", "round 3: every unit failed", "failed: round 3: every unit failed"),
        ("interrupted", "interrupted", "interrupted"),
    ],
)
def test_status_of_a_run_that_has_ended(
    status: str, error: str | None, expected: str, run: Path
) -> None:
    write_summary(run, status=status, error=error)
    lines = status_of(run, 100_000)
    assert lines["run"] == f"{expected}, last written 27.8 h ago"
    assert lines["round"] == "12 of 20"
    assert lines["test"] == "BLEU 87.5"


def test_units_that_did_not_train_are_named(run: Path) -> None:
    lines = list(made_lines(20))
    write_lines(run, lines[: FAILED[0]])
    (unit,) = lines[FAILED[0] - 1]["failures"]
    failed = status_of(run)
    assert failed["failed"] == f"unit {unit}: LinkError: the unit was switched off"
    assert failed["units"] == "3 of 4 scheduled units trained"
    write_lines(run, lines[: SET_ASIDE[0]])
    assert status_of(run)["excluded"] == "unit 7: WireError: a speed that is not finite"
    lines[SET_ASIDE[0] - 1]["excluded"] = dict.fromkeys(range(8), "gone")
    write_lines(run, lines[: SET_ASIDE[0]])
    assert status_of(run)["excluded"] == "unit 0, unit 1, unit 2 and 5 more: gone"
    write_lines(run, lines[:SKIPPED])
    assert status_of(run)["units"] == "round skipped: no unit can afford its upload"
    assert status_of(run)["train loss"].endswith("(round 6)")


def test_units_took_part_in_rounds_that_were_only_planned(run: Path) -> None:
    lines = [{**line, "seconds": {"plan": 1.0, "round": 1.0}} for line in made_lines(20)]
    write_lines(run, lines[:12])
    assert status_of(run)["units"] == "4 of 4 scheduled units took part"


def test_a_clock_without_uploads_is_marked(run: Path) -> None:
    write_lines(run, [*without_uploads(made_lines(12))])
    assert status_of(run)["clock"].endswith(" s, modelled, uploads not counted")


def test_the_latest_checkpoint_is_shown(run: Path) -> None:
    assert "checkpoint" not in status_of(run)
    (run / "checkpoints" / "000010").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("000010")
    assert status_of(run, 30)["checkpoint"] == "of round 10, 30 s ago"
    (run / "checkpoints" / "000010").rename(run / "checkpoints" / "mine")
    assert "checkpoint" not in status_of(run)
    (run / "checkpoints" / "mine").rmdir()
    assert "checkpoint" not in status_of(run)


def test_the_command_prints_one_screen(run: Path, command: Command) -> None:
    with writing(run):
        status, out, err = command("status", run)
    assert (status, err) == (0, "")
    assert out.startswith("run         running, last written ")
    assert len(out.splitlines()) < 20


def test_a_folder_without_a_run_is_a_one_line_error(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("nowhere", "no such folder"), ("empty", "config.yaml")):
        status, out, err = command("status", tmp_path / name)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert str(tmp_path / name) in err and message in err


def test_the_latest_run_is_the_default_of_status_and_report(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command("status")
    assert (status, str(tmp_path / "outputs") in err) == (2, True), err
    for age_s, name in ((30, "a/1"), (10, "a/2"), (20, "b/3")):
        folder = make_run(Path("outputs") / name, rounds=3)
        (folder / "overrides.json").write_text("[]")
        for file in folder.iterdir():
            os.utime(file, (NOW_S - age_s, NOW_S - age_s))
    status, out, err = command("status")
    assert (status, err) == (0, "")
    assert "folder      outputs/a/2\n" in out
    assert command("report") == (0, "outputs/a/2/report.html\n", "")


def test_control_characters_in_a_run_folder_are_not_printed(
    tmp_path: Path, command: Command
) -> None:
    unprintable = "\x1b[31m\u202e"
    run = make_run(tmp_path / f"run{unprintable}")
    metric = {"name": unprintable, "value": 1.0, "signature": unprintable, "extra_metrics": {}}
    write_summary(run, status=unprintable, error=unprintable, metric=metric)
    status, out, err = command("status", run)
    assert (status, err) == (0, "")
    assert not {*unprintable} & {*out} - {*"[31m"}


@pytest.mark.parametrize("name", ["²", "1²", "2 copy", "latest"])
def test_a_folder_with_an_unexpected_name_is_not_a_checkpoint(run: Path, name: str) -> None:
    (run / "checkpoints" / name).mkdir(parents=True)
    assert "checkpoint" not in status_of(run)
