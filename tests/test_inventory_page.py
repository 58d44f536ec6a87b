"""The inventory page lists exactly the keys of the schema."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from collapipe.inventory.schema import InventorySection
from collapipe.inventory.values import Section
from optim.solvers import CLUSTER_SOLVERS

PAGE = Path(__file__).parents[1] / "docs/reference/inventory.md"
_ROW = re.compile(r"^\| (`.*?`) \| (.*) \|$", re.MULTILINE)
_QUOTED = re.compile(r"`([^`]+)`")


def parts(kind: object) -> Iterator[object]:
    """Yield a type and the types within it."""
    yield kind
    for each in get_args(kind):
        yield from parts(each)


def keys(section: type[Section], of: str = "") -> Iterator[str]:
    """Yield each key as the page writes it, such as ``devices[].chunk.u``."""
    for name, field in section.model_fields.items():
        within = [*parts(field.annotation)]
        inner = [each for each in within if isinstance(each, type) and issubclass(each, Section)]
        called = f"{of}{name}" + "[]" * (bool(inner) and list in map(_origin, within))
        called = called.removeprefix("clusters[].") if "devices[]" in called else called
        yield called
        for each in inner:
            yield from keys(each, f"{called}.")


def _origin(kind: object) -> object:
    return getattr(kind, "__origin__", kind)


def values(section: type[Section]) -> Iterator[object]:
    """Yield the named values that keys may have."""
    for field in section.model_fields.values():
        for each in parts(field.annotation):
            if isinstance(each, type) and issubclass(each, Section):
                yield from values(each)
            elif isinstance(each, str):
                yield each


def rows() -> dict[str, set[str]]:
    """Return each key in a table's first column, with the code words of the row's meaning.

    A name without a dot belongs to the section of the name before it.
    """
    found = dict[str, set[str]]()
    text = PAGE.read_text().partition("## Batch and model")[2].partition("## How a named")[0]
    for names, meaning in _ROW.findall(text):
        spans = [each for each in _QUOTED.findall(meaning) if "/" not in each and "--" not in each]
        words = {word for each in spans for word in re.findall(r"\b[a-z][\w.]*\b", each)}
        place = ""
        for name in _QUOTED.findall(names):
            whole = name if "." in name or "[" in name else place + name
            place = whole[: whole.rfind(".") + 1]
            found[whole] = words
    return found


def test_each_key_is_on_the_page() -> None:
    shown = rows()
    below = {f"{key}.{word}" for key, words in shown.items() for word in words}
    lists = {"clusters[]", "devices[]", "round", "model", "pipeline"}  # their keys have rows
    assert len(shown) > 50
    assert {*keys(InventorySection)} - {*shown} - below == lists


def test_each_key_of_the_page_is_in_the_schema() -> None:
    known, shown = {*keys(InventorySection)}, rows()
    assert {*shown} <= known
    sections = {key for key in shown if any(each.startswith(f"{key}.") for each in known)}
    words = {word for key in sections for word in shown[key]}
    ends = {each.rpartition(".")[2].removesuffix("[]") for each in known}
    assert len(sections) >= 6
    assert words - ends - known - {*values(InventorySection), *CLUSTER_SOLVERS} == set()
