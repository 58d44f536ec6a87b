"""Standard streams that are closed, or cannot be written."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from collapipe.process import streams as output
from collapipe.process.streams import lasting_output, write_rest

Command = Callable[..., tuple[int, str, str]]
OPENED = """
import sys
from collapipe.process.streams import open_streams
open_streams()
with open("file", "w") as file:
    print("not into the file")
    file.write(str(file.fileno()))
assert sys.stdin is None
"""


class Full(io.StringIO):
    """A stream on a disk that is full, or that nobody reads."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error

    def fileno(self) -> int:
        return 99


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    script = 'exec <&- >&- 2>&-; exec "$@"'
    words = [sys.executable, "-c", OPENED]
    ended = subprocess.run(["bash", "-c", script, "bash", *words], cwd=tmp_path)
    assert ended.returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_texts_are_not_read_from_a_closed_stream(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = command("predict", tmp_path)
    assert (status, err.count("\n")) == (2, 1) and "standard input is closed" in err


def test_a_run_goes_on_where_its_lines_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where their reader has left."""
    monkeypatch.setattr(output, "_lost", [])
    monkeypatch.setattr(sys, "stdout", Full())
    print("round 1", file=lasting_output(), flush=True)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has nothing left to write
    assert write_rest(0) == 1
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        print("round 1", file=lasting_output(), flush=True)


@pytest.mark.parametrize(("number", "lines"), [(errno.ENOSPC, 1), (errno.EPIPE, 0)])
def test_lost_output_is_told_once_and_by_the_status(
    number: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_lost", [])
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", Full(number))
    assert (write_rest(0), write_rest(130)) == (1, 130)
    assert capsys.readouterr().err.count("\n") == lines
