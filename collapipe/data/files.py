"""Read a file of rows: CSV, TSV, JSON lines or text, plain or .gz."""

import codecs
import csv
import gzip
import json
import logging
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas
from datasets import Dataset, Features, Value

from collapipe.errors import ConfigError, DataError, one_line

_log = logging.getLogger(__name__)
csv.field_size_limit(2**31 - 1)  # characters; some texts exceed the default of 131,072

# A cell "NA" is text, and in TSV a quotation mark is text.
_DIALECTS: Mapping[str, Mapping[str, Any]] = {
    ".csv": {"delimiter": ",", "quoting": csv.QUOTE_MINIMAL},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
_SUFFIXES = (*_DIALECTS, ".json", ".jsonl", ".txt")


def read_file(path: Path, option: str, needed: Collection[str]) -> Dataset:
    """Read all rows into memory; blank lines of a text file are left out.

    Arrow cannot hold a JSON column with cells of different types or with a too large cell. Such a
    column is left out unless it is ``needed``. A field of a column is named ``column.field``.
    Raises ``DataError`` for an invalid file, and errors of ``check_file``.
    """
    suffix = check_file(path, option)
    if suffix in _DIALECTS:
        rows = _read_csv(path, _DIALECTS[suffix])
    elif suffix == ".txt":
        lines = StringIO(_whole(path), newline=None)
        rows = Dataset.from_dict({"text": [line.rstrip("\n") for line in lines if line.strip()]})
    else:
        rows = _read_json(path, {*needed, *(name.partition(".")[0] for name in needed)})
    if len(rows) == 0:
        raise DataError(f"{path}: has no rows; add some, or set another {option}")
    return rows


def check_file(path: Path, option: str) -> str:
    """Return the suffix that determines the file's format, without opening the file.

    Raises ``ConfigError`` for an unknown suffix, and ``DataError`` if the file is missing.
    """
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise ConfigError(f"{option}={path}: must end in one of {known}, optionally with .gz added")
    if not path.is_file():
        raise DataError(f"{option}={path}: there is no such file; correct the path")
    return suffix


def _whole(path: Path) -> str:
    if text := "".join(text_lines(path)):
        return text
    raise DataError(f"{path}: is empty; fetch the file again, or add rows")


def _read_csv(path: Path, dialect: Mapping[str, Any]) -> Dataset:
    """Read every cell as unchanged text, so that 007 does not become 7."""
    text = _whole(path)
    try:
        filled = filter(None, csv.reader(StringIO(text, newline=""), **dialect))
        head, first = [*islice(filled, 2), [], []][:2]
        _check_head(path, head, first)
        file = StringIO(text, newline="")
        frame = pandas.read_csv(file, **dialect, keep_default_na=False, dtype=object)
    except (csv.Error, ValueError) as error:  # includes pandas' errors
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise DataError(f"{path}: cannot be read ({cause}); correct the file") from error
    features = Features({name: Value("string") for name in frame.columns})
    return Dataset.from_pandas(frame, features, preserve_index=False)


def _check_head(path: Path, head: list[str], first: list[str]) -> None:
    if not first:
        raise DataError(f"{path}: has no rows below its head; add some, or set another file")
    names = [name or f"Unnamed: {n}" for n, name in enumerate(head)]  # as pandas calls it
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename one")
    if len(first) > len(names):  # pandas would take the first column for the rows' numbers
        raise DataError(
            f"{path}: row 1 has {len(first)} cells, the head has {len(names)}; quote a cell that "
            "holds the separator"
        )


def text_lines(path: Path) -> Iterator[str]:
    """Yield each line with its break, without a byte order mark.

    Lines end only at line feeds, because a text may contain other breaks. Raises ``DataError``,
    which names file and line, if the file cannot be read.
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


def _read_json(path: Path, needed: Collection[str]) -> Dataset:
    """Read one JSON object per line, or a list of objects; missing values become None. Python
    parses them, because ``datasets`` would convert texts that look like dates."""
    objects = list(_objects(path))
    names = dict.fromkeys(chain.from_iterable(row for _, row in objects))
    columns = {name: [row.get(name) for _, row in objects] for name in names}
    rows = _held(columns)
    if isinstance(rows, Dataset):
        return rows
    faults = {name: _fault(name, cells) for name, cells in columns.items()}
    for name, (number, cause) in ((n, fault) for n, fault in faults.items() if fault):
        message = f"{objects[number][0]}: column {name!r} cannot be read ({cause})"
        if name in needed:
            raise DataError(f"{message}; correct the cell, or give all cells of a column one type")
        _log.warning("%s; the column is left out", message)
    return Dataset.from_dict({name: columns[name] for name, fault in faults.items() if not fault})


def _held(columns: Mapping[str, list[Any]]) -> Dataset | str:
    """Return the columns as an Arrow data set, or a text with Arrow's error."""
    try:
        return Dataset.from_dict(dict(columns))
    except Exception as error:  # Arrow raises many classes
        return one_line(error)


def _fault(name: str, cells: list[Any]) -> tuple[int, str] | None:
    """Return the first cell (from 0) that Arrow cannot hold with those before, and why, or None."""
    cause = _held({name: cells})
    if isinstance(cause, Dataset):
        return None

    def fails(count: int) -> bool:
        return isinstance(_held({name: cells[:count]}), str)

    return bisect_left(range(1, len(cells)), x=True, key=fails), cause


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object and its place in the file, for messages."""
    lines = [*text_lines(path)]
    texts = {f"{path}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    whole = "".join(lines).lstrip().startswith("[")
    if whole:
        texts = {str(path): "".join(lines)}
    for where, text in texts.items():
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} cannot be read ({error}); write an object a line, or a list of objects"
            ) from error
        for number, row in enumerate(parsed if whole else [parsed], 1):
            if not isinstance(row, dict):
                raise DataError(f"{where}: holds {row!r:.40}, not an object; write one a row")
            yield f"{where}: object {number}" if whole else where, row
