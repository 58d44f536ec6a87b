"""Every command that a page shows is one that the command line takes, with options that exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

import click
import pytest
import typer

from collapipe.cli.app import app
from collapipe.config import load_overrides, loading, own_overrides
from collapipe.config.composing import composed
from collapipe.config.overrides import expand, split

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "collapipe/deployment/templates"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(TEMPLATES.glob("*.md"))]
_MARK = re.compile(r"<!-- not executed: \S")
_FENCE = re.compile(r" *```(\w*)$")
_INLINE = re.compile(r"`(collapipe \w[^`]*)`")
_PROMPT = re.compile(r"^(?:\w*\$+) ")
_KNOWN = "collapipe", "flwr", "make", "pip"
_OTHERS = "python3", "source", "ssh", "scp"  # nobody's to check
_FILLED_IN = "FILE", "FOLDER", "RUN_DIR", "NAME", "DIR", "home.yaml", "_target_"
_REST = "…"  # options that a reader adds
_NAMES = {"root": "federation", "unit": "berlin", "host": "edge.example", "port": "8000"}
_NAMES |= {"authority": "federation/authority", "federation": "runtime.federation=federation"}


def text_of(page: Path) -> str:
    """As it is read: templates are filled in."""
    text = page.read_text()
    return Template(text).safe_substitute(_NAMES) if page.parent == TEMPLATES else text


def blocks(page: Path) -> Iterator[str]:
    """Scripts of the blocks that hold commands and have no mark, without prompts and output."""
    marked, fenced, block = False, False, list[str]()
    for line in [*text_of(page).splitlines(), "", "the end"]:
        fence = _FENCE.match(line)
        if fence and not fenced:
            fenced, block = True, [fence[1]]
        elif (fenced and not fence) or line.startswith("    ") or (not line and block):
            block.append(line)
        elif fence or block:
            language, *lines = block if fence else ["", *block]
            script = commands_in(lines) if language in ("", "sh") else ""
            if script and not marked:
                yield script
            if script:
                marked = False
            fenced, block = False, []
        if _MARK.match(line):
            marked = True
    assert not marked, f"{page}: a mark without commands below it"


def commands_in(lines: Sequence[str]) -> str:
    """Lines behind a prompt, or all where the first one is a command; nothing of other blocks."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    prompted = [_PROMPT.sub("", line.strip()) for line in joined if _PROMPT.match(line.strip())]
    plain = [line.strip() for line in joined if line.strip()]
    begins = tuple(f"{name} " for name in _KNOWN)
    if not prompted and plain and plain[0].startswith(begins):
        prompted = plain
    return "\n".join(prompted)


def words(script: str, folder: Path) -> list[list[str]]:
    """What the shell makes of a script: the words of each command, none of which is run.

    A program that is none of the known ones fails.
    """
    noted = [f'{name}() {{ printf "%s\\0" {name} "$@"; echo; }}' for name in _KNOWN]
    stubs = "\n".join([*noted, *(f"{name}() {{ :; }}" for name in _OTHERS), ""])
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
        whole = name == "docs/deployment.md"
        yield pytest.param(page, whole, id=name)
        if not whole:
            yield pytest.param(page, True, id=f"{name}, whole", marks=pytest.mark.thorough)


@pytest.mark.parametrize(("page", "whole"), chosen())
def test_documented_commands_are_taken(
    page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of commands, targets of make, files of pip; options of runs are composed, and where a
    reader has nothing to fill in, they are checked as a run checks them, if ``whole``."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("inputs.txt", "FILE"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_check_there", lambda _: None)  # files of the reader's
    for command in (each for script in blocks(page) for each in words(script, tmp_path)):
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
        assert set(arguments) <= {*targets}, shown
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
