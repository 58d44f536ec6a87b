"""The command line accepts each command on the pages, and the options exist."""

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
    """Return the words of each command of a script, as the shell reads them; no command runs.

    An unknown program is an error.
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
    """Yield each page, and whether to check options of runs by building the named objects. The page
    whose runs take longest to try always builds; other pages do so in thorough tests."""
    for page in PAGES:
        name = f"{page.parent.name}/{page.name}"
        whole = name == "how-to/deployment.md"
        yield pytest.param(page, whole, id=name)
        if not whole:
            yield pytest.param(page, True, id=f"{name}, whole", marks=pytest.mark.thorough)


@pytest.mark.parametrize(("page", "whole"), [*chosen()])
def test_documented_commands_are_accepted(
    page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check options of commands, targets of make and files of pip. Options of runs are composed. If
    ``whole``, options without placeholders are checked as a run checks them."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("inputs.txt", "FILE"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "_check_there", lambda _: None)  # files that only the reader has
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
    """Raise if a command would be refused."""
    shown = shlex.join([program, *arguments])
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = {each for each in arguments if "=" not in each}
        assert named <= {*targets}, shown
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
    """Check a ``collapipe`` command, and the command after ``--``."""
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
        check_options(["runtime=deployment", *options], whole=False)  # any run's options
    if context.command.name == "run":
        whole = whole and _REST not in own
        for job in expand(options) if context.params.get("multirun") else [options]:
            check_options(job, whole and not context.params["config"])


def check_options(options: Sequence[str], whole: bool) -> None:
    """Raise ``ConfigError`` if a run would refuse the options."""
    check_once(tuple(options), whole)


@functools.cache  # several pages show the same command
def check_once(options: tuple[str, ...], whole: bool) -> None:
    if whole and not any(place in each for place in _FILLED_IN for each in options):
        load_overrides(own_overrides(options))
    else:
        composed(own_overrides([re.sub("=NAME$", "=random", each) for each in options]))


@functools.cache  # typer builds all commands, which takes longer than to read one
def whole_command() -> click.Command:
    return typer.main.get_command(app)


def taken(arguments: list[str]) -> click.Context:
    """Return the command's context, as click reads ``arguments``."""
    context, name, command = None, "collapipe", whole_command()
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not isinstance(command, click.Group):
            return context
        rest = [*context._protected_args, *context.args]  # the public name warns in click 8
        if not rest:  # such as ``collapipe device``, which has subcommands
            return context
        found, command, arguments = command.resolve_command(context, rest)  # type: ignore[assignment]
        name = str(found)


def is_name(arguments: Sequence[str]) -> bool:
    """Return whether the words only name a command, without arguments."""
    command: click.Command | None = whole_command()
    for each in arguments:
        command = command.commands.get(each) if isinstance(command, click.Group) else None
    return command is not None
