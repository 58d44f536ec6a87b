"""The message after a deployed run was stopped says whether the run can be resumed."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from collapipe.deployment import submitting


@pytest.mark.parametrize("begun", [False, True])
def test_a_stopped_run_names_the_resume_command_only_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    flower, server = MagicMock(), MagicMock()
    flower.at.return_value.submit.return_value = "7"
    flower.at.return_value.wait.side_effect = KeyboardInterrupt
    for name, double in (("Flower", flower), ("ServerFolder", server)):
        monkeypatch.setattr(submitting, name, double)
    monkeypatch.setattr(submitting, "_opening", lambda server: "")
    if begun:
        (tmp_path / "checkpoints" / "000005").mkdir(parents=True)
    settings = SimpleNamespace(
        runtime=SimpleNamespace(federation=tmp_path), run_dir=tmp_path, text=""
    )
    with pytest.raises(KeyboardInterrupt):
        submitting.submit(tmp_path, settings, "collapipe resume")  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()[-1]
    expected = "go on after round 5 with: collapipe resume" if begun else "it has no checkpoint"
    assert printed.startswith(f"stopped      run 7 on all machines; {expected}")
    flower.at.return_value.ask.assert_called_with("stop", "7")
    server.return_value.update_connection.assert_called_once_with()
