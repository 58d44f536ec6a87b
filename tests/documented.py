"""Code blocks of the documentation's pages, and the reader's files that the pages name."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "collapipe/deployment/templates"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(TEMPLATES.glob("*.md")),
]
OURS = "collapipe", "flwr", "make", "pip"  # programs whose command lines are checked
OTHERS = "python3", "source", "ssh", "scp", "export", "rm", "zcat", "pytest", "flower-supernode"
_MARK = re.compile(r"<!-- not executed: \S")
_FENCE = re.compile(r" *```(\w*)$")
_PROMPT = re.compile(r"^(?:\w*\$+) ")
_FILE = re.compile(r"`([~\w./-]+\.(?:py|yaml|toml))`")
_SUFFIX = {"python": ".py", "yaml": ".yaml", "": ".toml"}  # of a reader's files, by language
_NAMES = {"root": "federation", "unit": "berlin", "host": "edge.example", "port": "8000"}
_NAMES |= {"authority": "federation/authority", "federation": "runtime.federation=federation"}


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page."""

    commands: str  # without output: lines with a prompt, or all if the first line is a command
    language: str
    text: str
    file: str | None  # named in the paragraph before the block
    marked: bool  # as a block that cannot be executed


def text_of(page: Path) -> str:
    """Return the page's text, with templates filled in."""
    text = page.read_text()
    return Template(text).safe_substitute(_NAMES) if page.parent == TEMPLATES else text


def blocks(page: Path) -> Iterator[Block]:
    """Yield the page's blocks, fenced and indented ones, in order."""
    marked, fenced, block, before = False, False, list[str](), ""
    for line in [*text_of(page).splitlines(), "", "the end"]:
        fence = _FENCE.match(line)
        if fence and not fenced:
            fenced, block = True, [fence[1]]
        elif (fenced and not fence) or line.startswith("    ") or (not line and block):
            block.append(line)
        elif fence or block:
            language, *lines = block if fence else ["", *block]
            commands = commands_in(lines) if language in ("", "sh") else ""
            file = None if commands else file_in(before, _SUFFIX.get(language, "/"))
            yield Block(commands, language, "\n".join([*lines, ""]), file, marked)
            if commands:
                marked = False
            fenced, block, before = False, [], ""
        if not fence and not block and line:
            before = f"{before} {line}"
        elif not line and not fenced and not block and not before.endswith(":"):
            before = ""
        if _MARK.match(line):
            marked = True
    assert not marked, f"{page}: the mark has no commands below it"


def commands_in(lines: Sequence[str]) -> str:
    """Return the lines with a prompt, or all lines if the first one is a command."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    prompted = [_PROMPT.sub("", line.strip()) for line in joined if _PROMPT.match(line.strip())]
    plain = [line.strip() for line in joined if line.strip()]
    begins = tuple(f"{name} " for name in (*OURS, *OTHERS))
    if not prompted and plain and plain[0].startswith(begins):
        prompted = plain
    return "\n".join(prompted)


def file_in(paragraph: str, suffix: str) -> str | None:
    """Return the reader's file that the paragraph names, or None."""
    named = [each for each in _FILE.findall(paragraph) if each.endswith(suffix)]
    return next((each for each in named if not (ROOT / each).exists()), None)
