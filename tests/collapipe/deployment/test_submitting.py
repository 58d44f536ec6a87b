"""The message after a deployed run was stopped says whether it can be resumed, or had ended."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from flwr.supercore.error import ApiErrorCode

from collapipe.deployment import submitting
from collapipe.errors import LinkError


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's commands, of which the one that waits for a run is interrupted."""
    flower, server = MagicMock(), MagicMock()
    flower.at.return_value.submit.return_value = "7"
    flower.at.return_value.wait.side_effect = KeyboardInterrupt
    for name, double in (("Flower", flower), ("ServerFolder", server)):
        monkeypatch.setattr(submitting, name, double)
    monkeypatch.setattr(submitting, "_opening", lambda server: "")
    return flower.at.return_value


def submit(folder: Path) -> None:
    settings = SimpleNamespace(runtime=SimpleNamespace(federation=folder), run_dir=folder, text="")
    submitting.submit(folder, settings, "collapipe resume")  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", [False, True])
def test_a_stopped_run_names_the_resume_command_only_with_a_checkpoint(
    tmp_path: Path, flower: MagicMock, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    if begun:
        (tmp_path / "checkpoints" / "000005").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path)
    printed = capsys.readouterr().out.splitlines()[-1]
    expected = "go on after round 5 with: collapipe resume" if begun else "it has no checkpoint"
    assert printed.startswith(f"stopped      run 7 on all machines; {expected}")
    flower.ask.assert_called_with("stop", "7")
    submitting.ServerFolder.return_value.update_connection.assert_called_once_with()  # type: ignore[attr-defined]


def test_an_interrupt_after_the_runs_end_is_no_error(
    tmp_path: Path, flower: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    code = int(ApiErrorCode.RUN_ALREADY_FINISHED)
    flower.ask.side_effect = LinkError(f"flwr stop failed: [code: {code}] Run is over.")
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1].startswith("ended        run 7")
    flower.ask.side_effect = LinkError("flwr stop failed: connection refused")
    with pytest.raises(LinkError, match="refused"):
        submit(tmp_path)
