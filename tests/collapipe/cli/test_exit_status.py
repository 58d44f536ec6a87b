"""A machine that cannot run a command any further is one line on standard error."""

import pytest

from collapipe.cli.exit_status import status_of


def test_a_thread_that_cannot_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise RuntimeError("can't start new thread")

    assert status_of(command) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: can't start new thread: no process or memory is left; raise ulimit -u or -v"
    ]
