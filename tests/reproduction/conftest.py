"""The figures' command as a function."""

import sys
from collections.abc import Callable

import pytest

from reproduction.__main__ import main


@pytest.fixture
def reproduce(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run ``python -m reproduction ARGUMENTS``: status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["reproduction", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        print(captured.out, captured.err)  # pytest shows it if the test fails
        return status, captured.out, captured.err

    return run
