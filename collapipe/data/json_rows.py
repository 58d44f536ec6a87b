"""Rows of a JSON file: an object a line, or a list of objects."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from collapipe.data.text_lines import text_lines
from collapipe.errors import DataError


def read_json(path: Path) -> Dataset:
    """All rows; what an object lacks is None. Raises ``DataError``.

    Python reads them: datasets would make a date of each text in a column whose texts look so.
    """
    rows = list(_objects(path))
    names = dict.fromkeys(chain.from_iterable(rows))
    try:
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except Exception as error:  # Arrow's kinds
        cause = str(error).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read ({cause}); give all cells of a column one type"
        ) from error


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    lines = list(text_lines(path))
    whole = next((line for line in lines if line.strip()), "").lstrip().startswith("[")
    texts = [(str(path), "".join(lines))] if whole else _numbered(path, lines)
    for where, text in texts:
        parsed = _parsed(text, where)
        for row in parsed if whole else [parsed]:
            if not isinstance(row, dict):
                raise DataError(f"{where}: holds {row!r:.40}, not an object; write one a row")
            yield row


def _numbered(path: Path, lines: list[str]) -> list[tuple[str, str]]:
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{where} cannot be read ({error}); write an object a line, or a list of objects"
        ) from error
