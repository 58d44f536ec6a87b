"""Sentences as .conll files: ``word tag`` a line, a blank line between sentences."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from collapipe.data.split_files import Lines
from collapipe.errors import DataError

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-\S+")


def parse_tagged(file: Lines) -> list[dict[str, Any]]:
    """Columns ``tokens`` and ``tags``. Raises ``DataError`` with file and line."""
    return [{"tokens": words, "tags": tags} for words, tags in _sentences(file)]


def _sentences(file: Lines) -> Iterator[tuple[list[str], list[str]]]:
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*file.lines, ""], 1):
        if line.strip():
            word, tag = _word(line, file.at(number))
            words.append(word)
            tags.append(check_tag(tag, tags[-1] if tags else OUTSIDE, file.at(number)))
        elif words:
            yield words, tags
            words, tags = [], []


def _word(line: str, where: str) -> tuple[str, str]:
    parts = line.replace("\t", " ").split(" ")
    if len(parts) != 2 or not parts[0]:
        raise DataError(f"{where} is not a word, a blank and its tag; correct the line")
    return parts[0], parts[1]


def check_tag(tag: str, before: str, where: str) -> str:
    """``tag``; raises ``DataError`` with ``where`` it stands if IOB2 has none such behind
    ``before``, which is O at a sentence's start."""
    if wrong := _fault(tag, before):
        raise DataError(f"{where}: tag {tag!r} {wrong}")
    return tag


@functools.lru_cache  # a corpus has many words and few tags
def _fault(tag: str, before: str) -> str | None:
    if _TAG.fullmatch(tag) is None:
        return "is not O, B-TYPE or I-TYPE; write it as IOB2 does"
    kind = tag[2:]
    if tag.startswith("I-") and before[2:] != kind:
        return f"continues no entity; in IOB2 an entity begins with B-{kind}, convert the tags"
    return None
