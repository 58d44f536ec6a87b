"""``collapipe up`` starts daemons with the requested options and ends them."""

import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from federated import TINY

from collapipe.cli import up
from collapipe.config import load_overrides, own_overrides
from collapipe.inventory.file import read_inventory
from collapipe.runs.confirmation import resume_command
from collapipe.state import BlockCost

Command = Callable[..., tuple[int, str, str]]
UP = (sys.executable, "-m", "collapipe", "up", "--devices", "2")
COST = BlockCost(1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.thorough
def test_daemons_run_until_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    options = ("--memory", "500MB,1GB", "--inventory", file)
    with subprocess.Popen([*UP, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("Ctrl-C ends the devices" in line for line in process.stdout)
        devices = read_inventory(file, COST).section.clusters[0].devices
        assert [each.memory_bytes for each in devices] == [500e6, 1e9]
        started = [int(each.process_id or 0) for each in devices]
        assert all(map(psutil.pid_exists, started))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not any(map(psutil.pid_exists, started))
    assert not file.exists()


@pytest.mark.thorough
def test_a_signal_ends_the_run_and_the_daemons(tmp_path: Path) -> None:
    options = [*TINY, "federation.rounds=100000", f"hydra.run.dir={tmp_path / 'run'}"]
    command = [*UP, "--", "run", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert "task dates" in next(iter(process.stdout))
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3  # the run and two devices
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(60) != 0
    assert not any(each.is_running() for each in started)


def test_sigterm_ends_the_run_even_if_sigint_is_ignored() -> None:
    """In a script, ``collapipe up … -- run &`` ignores SIGINT, and its child inherits this."""
    child = (
        "import signal, sys, time\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('runs', flush=True)\n"
        "time.sleep(60)"
    )
    program = (
        "import sys\n"
        "from collapipe.cli.up import run_command\n"
        "from collapipe.cli.interrupts import sure_interrupts\n"
        "with sure_interrupts():\n"
        f"    sys.exit(run_command([sys.executable, '-c', {child!r}]))"
    )
    ignoring = "sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", program
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7


def test_the_runs_exit_status_is_returned(tmp_path: Path) -> None:
    command = [*UP[:-1], "1", "--", "run", "nonsense=1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "nonsense" in ended.stderr


@pytest.mark.parametrize("memory", ["1GB,1GB,1GB", "1GB,much"])
def test_an_invalid_memory_option_starts_no_device(command: Command, memory: str) -> None:
    status, _, errors = command("up", "--devices", 2, "--memory", memory)
    assert status == 2
    assert "--memory" in errors


def test_an_inventory_that_cannot_be_made_leaves_no_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "boxes.yaml.step.json").mkdir()
    file = tmp_path / "boxes.yaml"
    status, _, err = command("up", "--inventory", file, "--", "run")
    assert (status, file.exists()) == (2, False)
    assert f"--inventory {file}: cannot be made (Is a directory)" in err


@pytest.mark.parametrize("other", ["runn", "resumes", "device"])
def test_another_command_than_run_starts_no_device(command: Command, other: str) -> None:
    status, _, errors = command("up", "--", other, "federation.rounds=1")
    assert status == 2
    assert f"{other}: up trains by `run` or `resume` alone" in errors


def test_a_command_ended_by_a_signal_has_the_exit_status_of_a_shell() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert up.run_command([sys.executable, "-c", code]) == 128 + 15


def test_an_interrupted_run_reports_it_once() -> None:
    """The command that has started the run returns its status without another line."""
    program = (
        "import sys\n"
        "from collapipe.cli import app, up\n"
        "run = [sys.executable, '-c', 'raise SystemExit(130)']\n"
        "app._run = lambda: up.run_command(run)\n"
        "app.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize(("own", "threads"), [([], 1), (["pipeline.threads=2"], 2)])
def test_the_run_uses_one_thread_by_default(
    own: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[str]()
    monkeypatch.setattr(up, "started", lambda *_: nullcontext({}))
    monkeypatch.setattr(up, "_devices", lambda *_: [])
    monkeypatch.setattr(up, "run_command", lambda arguments: given.extend(arguments) or 0)
    up.up(1, 1, None, "1GB", ["run", *own], [])
    options = [each for each in given[1:] if each.startswith("pipeline.")]
    assert load_overrides(own_overrides(options)).pipeline.threads == threads


def test_a_run_that_ends_early_names_the_command_that_starts_its_devices_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[list[str]]()

    def run_command(arguments: Sequence[str]) -> int:
        given.append([*arguments])
        given.append(shlex.split(resume_command(load_overrides(["hydra.run.dir=a b"]))))
        return 0

    monkeypatch.setattr(up, "started", lambda *_: nullcontext({}))
    monkeypatch.setattr(up, "_devices", lambda *_: [])
    monkeypatch.setattr(up, "run_command", run_command)
    up.up(2, 3, None, "1GB,2GB", ["run"], [])
    own = ["--devices=2", "--clusters=3", "--memory=1GB,2GB"]
    again = given.pop()
    assert again == ["collapipe", "up", *own, "--", "resume", "a b"]
    (first,) = given
    up.up(2, 3, None, "1GB,2GB", again[6:], [])
    assert given[1][:-1] == ["resume", "a b"]
    assert given[1][-1].startswith("cluster.file=") and first[3].startswith("cluster.file=")
    assert resume_command(load_overrides([])).startswith("collapipe resume ")


def test_verbose_is_passed_on_to_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = list[list[str]]()
    monkeypatch.setattr(up, "run_command", lambda arguments: given.append([*arguments]) or 0)
    for level in (logging.INFO, logging.DEBUG):
        with caplog.at_level(level, "collapipe"):
            up.run_or_wait(["collapipe"], ["run"], [], "", "", {})
    assert given == [["collapipe", "run"], ["collapipe", "--verbose", "run"]]


def test_a_process_that_ends_meanwhile_is_named_once_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(up, "time", SimpleNamespace(sleep=sleep))
    log = tmp_path / "device-1.log"
    log.write_text("ready\nno space left\n")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as ended:
        ended.wait()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as runs:
            processes = {tmp_path / "device-0.log": runs, log: ended}
            assert up.run_or_wait([], [], [], "inventory x", "the devices", processes) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "device-1 has ended, status 3: no space left"
    assert sum("has ended" in line for line in lines) == 1
