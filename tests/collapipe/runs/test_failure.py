"""A run's failure, from the process that trained to the one that waits."""

from pathlib import Path

import pytest

from collapipe.errors import CollaPipeError, ConfigError, DataError, RoundFailedError
from collapipe.runs.failure import take_failure, write_failure


@pytest.mark.parametrize("kind", [ConfigError, DataError, RoundFailedError])
def test_it_is_told_once_with_its_status(kind: type[CollaPipeError], tmp_path: Path) -> None:
    write_failure(tmp_path, kind("two\nlines"))
    told = take_failure(tmp_path)
    assert (str(told), told.exit_status) == ("two lines", kind.exit_status)
    assert list(tmp_path.iterdir()) == []
    assert take_failure(tmp_path).exit_status == 1


def test_no_folder_is_made_for_it(tmp_path: Path) -> None:
    write_failure(tmp_path / "absent", ConfigError("bad"))
    assert list(tmp_path.iterdir()) == []
