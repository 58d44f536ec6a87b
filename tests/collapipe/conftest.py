"""Fixture that runs the command line in this process."""

import functools
import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import typer.main

from collapipe.cli.app import main
from server_app.records import shard_picture

# typer builds all commands, which takes longer than to read one
_command_of = functools.cache(typer.main.get_command)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run ``collapipe ARGUMENTS``: exit status, standard output, standard error.

    Runs draw no picture of their shards, as in ``federated.train``.
    """
    monkeypatch.setattr(shard_picture, "draw", lambda *arguments: arguments[-1].touch())
    monkeypatch.setattr(typer.main, "get_command", _command_of)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level  # some commands configure logging

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["collapipe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        print(captured.out, captured.err)  # pytest shows this output if the test fails
        return int(ended.value.code or 0), captured.out, captured.err

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
