"""``collapipe deploy trial`` starts a federation on this machine and ends it."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from federated import TINY
from run_files import summary_of

from collapipe.cli.app import child_command
from collapipe.cli.deploy import trial
from collapipe.cli.up import Started, started
from collapipe.config import load_overrides
from collapipe.deployment.checking import read_unit
from collapipe.errors import RoundFailedError
from collapipe.runs.confirmation import resume_command


def test_units_have_credentials_and_share_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"ünit {number}", "label": number % 2} for number in range(10)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    commanded, found = list[tuple[str, ...]](), list[list[object]]()

    @contextmanager
    def recorded(_: object, commands: Mapping[Path, Started]) -> Iterator[None]:
        commanded.extend(command for command, _, _ in commands.values())
        yield

    def run(program: Sequence[str], arguments: Sequence[str], *_: object) -> int:
        for _, unit_file in commanded[1:]:
            owner, own = read_unit(Path(unit_file))
            assert own.member.name == owner.name
            dealt = Path(unit_file).parent / str(owner.data.train_file)
            found.append([json.loads(line) for line in dealt.read_text().splitlines()])
        options = ["runtime=deployment", f"runtime.federation={commanded[0][-1]}"]
        assert [*arguments] == ["run", "task=x", *options]
        again = ["collapipe", "deploy", "trial", "--units=4", f"--rows={file}", "--", "resume"]
        assert shlex.split(resume_command(load_overrides([*options, "hydra.run.dir=a b"]))) == [
            *again,
            "a b",
        ]
        return 3

    monkeypatch.setattr(trial, "started", recorded)
    monkeypatch.setattr(trial, "run_or_wait", run)
    assert trial.trial(4, file, ["run", "task=x"], []) == 3
    assert [command[:1] for command in commanded] == [("deploy",), *[("unit",)] * 4]
    assert found == [rows[unit::4] for unit in range(4)]
    assert not Path(commanded[0][-1]).exists()


def test_a_failed_run_shows_the_units_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server reports only that a unit's log says more, and the trial removes the log."""

    @contextmanager
    def failed(_: object, commands: Mapping[Path, Started]) -> Iterator[None]:
        for file in commands:
            file.write_text("early\n" + "later\n" * 4 + f"{file.name}: no column")
        yield

    monkeypatch.setattr(trial, "started", failed)
    monkeypatch.setattr(trial, "run_or_wait", lambda *_: 1)
    assert trial.trial(2, None, ["run"], []) == 1
    shown = capsys.readouterr().err
    assert "log of berlin:" in shown and "paris.log: no column" in shown and "early" not in shown


def test_a_process_that_does_not_start_is_reported_with_its_last_output(tmp_path: Path) -> None:
    """The failure is noticed while an earlier process is not ready yet."""
    waits = Started(("device", "--listen", "127.0.0.1:0", "--insecure"), "never", 1)
    ends = Started(("deploy", "serve", str(tmp_path)), "ready", 1)
    with (
        pytest.raises(RoundFailedError, match=r"deploy serve .*server\.yaml"),
        started(child_command(), {tmp_path / "device.log": waits, tmp_path / "server.log": ends}),
    ):
        pass


@pytest.mark.thorough
def test_a_trial_trains_and_leaves_no_process(tmp_path: Path) -> None:
    options = *TINY, "federation.rounds=1", f"hydra.run.dir={tmp_path / 'run'}"
    command = [sys.executable, "-m", "collapipe", "deploy", "trial", "--units", "2", "--", "run"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary_of(tmp_path / "run")["status"] == "completed"
    left = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    assert [each for each in left if "collapipe-trial-" in each] == []
