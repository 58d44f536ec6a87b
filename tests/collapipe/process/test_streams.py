"""Standard streams may be closed or fail to be written."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

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
    """A stream on a full disk, or a pipe without a reader."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error

    def fileno(self) -> int:
        return 99


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    script = 'exec <&- >&- 2>&-; exec "$@"'
    words = [sys.executable, "-c", OPENED]
    ended = subprocess.run(["bash", "-c", script, "bash", *words], cwd=tmp_path)
    assert ended.returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_predict_fails_if_standard_input_is_closed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = command("predict", tmp_path)
    assert (status, err.count("\n")) == (2, 1) and "standard input is closed" in err


def test_a_run_continues_if_its_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not continue if the reader of its output has closed the pipe."""
    monkeypatch.setattr(output, "_lost", [])
    monkeypatch.setattr(sys, "stdout", Full())
    print("round 1", file=lasting_output(), flush=True)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # a stream with nothing left to write
    assert write_rest(0) == 1
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        print("round 1", file=lasting_output(), flush=True)


def test_a_program_may_train_without_a_usable_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have no console, have closed its output, or write letters of few languages."""
    monkeypatch.setattr(output, "_lost", [])
    closed, ascii_ = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    closed.close()
    for stream in (None, closed, ascii_):
        monkeypatch.setattr(sys, "stdout", stream)
        print("0.4 → 0.3", file=lasting_output(), flush=True)
    assert cast(io.BytesIO, ascii_.buffer).getvalue() == b"0.4 \\u2192 0.3\n"
    assert write_rest(0) == 1


@pytest.mark.parametrize(("number", "lines"), [(errno.ENOSPC, 1), (errno.EPIPE, 0)])
def test_lost_output_is_reported_once_and_by_the_exit_status(
    number: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_lost", [])
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", Full(number))
    assert (write_rest(0), write_rest(130)) == (1, 130)
    assert capsys.readouterr().err.count("\n") == lines
