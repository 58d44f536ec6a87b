"""The process that trains passes a run's failure to the process that waits."""

from pathlib import Path

import pytest
from full_disk import full_disk

from collapipe.errors import CollaPipeError, ConfigError, DataError, RoundFailedError
from collapipe.runs.failure import take_failure, write_failure
from collapipe.runs.reading import how_to_go_on


@pytest.mark.parametrize("kind", [ConfigError, DataError, RoundFailedError])
def test_a_failure_is_reported_once_with_its_exit_status(
    kind: type[CollaPipeError], tmp_path: Path
) -> None:
    write_failure(tmp_path, kind("two\nlines"))
    failure = take_failure(tmp_path, "resume")
    assert (str(failure), failure.exit_status) == ("two lines", kind.exit_status)
    assert list(tmp_path.iterdir()) == []
    assert "before it began" in str(again := take_failure(tmp_path, "resume"))
    assert again.exit_status == 1


def test_the_error_of_a_killed_run_explains_how_to_resume(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    message = str(take_failure(tmp_path, "resume it"))
    assert message.endswith(how_to_go_on(tmp_path)) and "checkpoint_every" in message
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    assert how_to_go_on(tmp_path).endswith(f"round 1 with: collapipe resume {tmp_path}")
    assert "was killed" in str(killed := take_failure(tmp_path, "resume it"))
    assert str(killed).endswith("go on after round 1 with: resume it")
    (tmp_path / "summary.json").touch()  # the run ended normally and stated its result
    assert "was killed" not in str(take_failure(tmp_path, "resume it"))


def test_a_failure_creates_no_folder(tmp_path: Path) -> None:
    assert not write_failure(tmp_path / "absent", ConfigError("bad"))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_a_full_disk_leaves_the_error_to_the_runs_output(tmp_path: Path) -> None:
    with full_disk():
        assert not write_failure(tmp_path, RoundFailedError("x" * 200))
    assert list(tmp_path.iterdir()) == []
    assert "last lines above" in str(take_failure(tmp_path, "resume"))
