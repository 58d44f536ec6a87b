"""The error page quotes messages that are in the product's code."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = "collapipe", "optim", "pipeline", "client_app", "server_app"
_EXAMPLE = re.compile(r"jetson|pi-5|berlin|\b\d[\d.]*\b|\b[A-Z]\b|FILE|LINE|…")
_LONG = 10  # letters: shorter pieces of a message prove nothing


@functools.cache
def texts() -> str:
    """Return all texts of the product's code, with ``…`` for values within a text."""
    found = list[str]()
    for file in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_in_the_code() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    pieces = {p.strip(" :;,()") for quote in quoted for p in _EXAMPLE.split(quote)}
    longer = {piece for piece in pieces if len(piece) >= _LONG}
    assert len(longer) > 45
    assert sorted(piece for piece in longer if piece not in texts()) == []
