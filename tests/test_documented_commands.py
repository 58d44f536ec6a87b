"""Every command that a page shows is one that the command line takes, with options that exist."""

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
import typer
from documented import OTHERS, OURS, PAGES, ROOT, blocks, text_of

from collapipe import config
from collapipe.cli.app import app
from collapipe.config import load_overrides, own_overrides
from collapipe.config.composing import composed
from collapipe.config.overrides import expand, split

_INLINE = re.compile(r"`(collapipe \w[^`]*)`")
_FILLED_IN = "FILE", "FOLDER", "RUN_DIR", "NAME", "DIR", "home.yaml", "_target_"
_REST = "…"  # options that a reader adds


def words(script: str, folder: Path) -> list[list[str]]:
    """What the shell makes of a script: the words of each command, none of which is run.

    A program that is none of the known ones fails.
    """
    noted = [f'{name}() {{ printf "%s\\0" {name} "$@"; echo; }}' for name in OURS]
    stubs = "\n".join([*noted, *(f"{name}() {{ :; }}" for name in OTHERS if name != "export"), ""])
    ended = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", stubs + script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert not ended.returncode and not ended.stderr, f"{script}\n{ended.stderr}"
    return [line.split("\0") for line in ended.stdout.split("\0\n") if line]


def chosen() -> Iterator[object]:
    """Pages, and whether options of runs are checked by building what they name: of the page whose
    runs take longest to try always, of the others in thorough tests."""
    for page in PAGES:
        name = f"{page.parent.name}/{page.name}"
        whole = name == "how-to/deployment.md"
        yield pytest.param(page, whole, id=name)
        if not whole:
            yield pytest.param(page, True, id=f"{name}, whole", marks=pytest.mark.thorough)


@pytest.mark.parametrize(("page", "whole"), [*chosen()])
def test_documented_commands_are_taken(
    page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of commands, targets of make, files of pip; options of runs are composed, and where a
    reader has nothing to fill in, they are checked as a run checks them, if ``whole``."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("inputs.txt", "FILE"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "_check_there", lambda _: None)  # files of the reader's
    for block in blocks(page):
        if block.file and not block.file.startswith("~"):
            (file := tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        for command in words(block.commands, tmp_path):
            check(whole, *command)
    for text in _INLINE.findall(text_of(page).replace("\n", " ")):
        ((_, *arguments),) = words(text, tmp_path)
        if not is_name(arguments):
            check(whole, "collapipe", *arguments)


def check(whole: bool, program: str, *arguments: str) -> None:
    """Raise where a command would not be taken."""
    shown = shlex.join([program, *arguments])
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        asked = {each for each in arguments if "=" not in each}
        assert asked <= {*targets}, shown
    elif program == "pip":
        files = [name for name in arguments if name.endswith(".txt")]
        assert all((ROOT / name).exists() for name in files), shown
    elif program == "flwr":
        values = [each for each in arguments if each.startswith("overrides=")]
        for _, value in (each.split("=", 1) for each in values):
            check_options(split(value.strip('"')), whole)
    else:
        check_collapipe(whole, list(arguments))


def check_collapipe(whole: bool, arguments: list[str]) -> None:
    """Also a command behind ``--``."""
    own, _, run = (
        (arguments, "", [])
        if "--" not in arguments
        else (arguments[: arguments.index("--")], "--", arguments[arguments.index("--") + 1 :])
    )
    context = taken(["0" if each == "N" else each for each in own if each != _REST])
    if run:
        check_collapipe(whole, run)
    options = [*(context.params.get("overrides") or [])]
    if context.command.name == "resume":
        check_options(["runtime=deployment", *options], whole=False)  # that of some run
    if context.command.name == "run":
        whole = whole and _REST not in own
        for job in expand(options) if context.params.get("multirun") else [options]:
            check_options(job, whole and not context.params["config"])


def check_options(options: Sequence[str], whole: bool) -> None:
    """Raise ``ConfigError`` where a run would refuse them."""
    check_once(tuple(options), whole)


@functools.cache  # several pages show the same command
def check_once(options: tuple[str, ...], whole: bool) -> None:
    if whole and not any(place in each for place in _FILLED_IN for each in options):
        load_overrides(own_overrides(options))
    else:
        composed(own_overrides([re.sub("=NAME$", "=random", each) for each in options]))


def taken(arguments: list[str]) -> click.Context:
    """The command's context, as click reads ``arguments``."""
    command: click.Command = typer.main.get_command(app)
    context, name = None, "collapipe"
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not isinstance(command, click.Group):
            return context
        rest = [*context.protected_args, *context.args]
        if not rest:  # such as ``collapipe device``, which has commands below it
            return context
        found, command, arguments = command.resolve_command(context, rest)  # type: ignore[assignment]
        name = str(found)


def is_name(arguments: Sequence[str]) -> bool:
    """Whether a text speaks of a command, and not of how it is typed."""
    command: click.Command | None = typer.main.get_command(app)
    for each in arguments:
        command = command.commands.get(each) if isinstance(command, click.Group) else None
    return command is not None
