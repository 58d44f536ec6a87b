"""Lines and JSON objects of a file, plain or .gz, which must be UTF-8."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from collapipe.errors import DataError


def text_lines(path: Path) -> Iterator[str]:
    """Each line with its break, without the mark that some programs put before the first.

    Lines end at line feeds only: other breaks may stand inside a text. Raises ``DataError`` that
    names file and line.
    """
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise DataError(
            f"{path}:{number} is not UTF-8 ({byte}); convert the file to UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch the file again") from error


def read_json(path: Path) -> Dataset:
    """Rows of a file with an object a line, or a list of objects; what an object lacks is None.

    Raises ``DataError``. Python reads them: datasets would make a date of each text in a column
    whose texts look so.
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
