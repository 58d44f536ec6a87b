"""One file of rows: CSV, TSV, JSON lines or text, plain or .gz."""

import codecs
import csv
import gzip
import json
import logging
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas
from datasets import Dataset, Features, Value

from collapipe.errors import ConfigError, DataError, one_line

_log = logging.getLogger(__name__)
csv.field_size_limit(2**31 - 1)  # characters; its own limit of 131,072 is less than some texts have

# Not a cell is empty because it says NA, and in TSV a quotation mark is text.
_DIALECTS: Mapping[str, Mapping[str, Any]] = {
    ".csv": {"delimiter": ",", "quoting": csv.QUOTE_MINIMAL},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
_SUFFIXES = (*_DIALECTS, ".json", ".jsonl", ".txt")


def read_file(path: Path, option: str, needed: Collection[str]) -> Dataset:
    """All rows, in memory; blank lines of a text are left out.

    A column of JSON that Arrow cannot hold, for its cells are of different types or one is too
    large, is left out unless it is ``needed``; a field of a column is called ``column.field``.
    Raises ``DataError`` for what cannot be read, and as ``check_file``.
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
    """The suffix that says what is in the file, which is not opened.

    Raises ``ConfigError`` for one that is not known, ``DataError`` where there is no such file.
    """
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise ConfigError(f"{option}={path}: the suffix must be one of {known}, and .gz behind it")
    if not path.is_file():
        raise DataError(f"{option}={path}: there is no such file; correct the path")
    return suffix


def _whole(path: Path) -> str:
    if text := "".join(text_lines(path)):
        return text
    raise DataError(f"{path}: is empty; fetch the file again, or add rows")


def _read_csv(path: Path, dialect: Mapping[str, Any]) -> Dataset:
    """Every cell as text, as it stands: no 007 becomes 7."""
    text = _whole(path)
    try:
        filled = filter(None, csv.reader(StringIO(text, newline=""), **dialect))
        head, first = [*islice(filled, 2), [], []][:2]
        _check_head(path, head, first)
        file = StringIO(text, newline="")
        frame = pandas.read_csv(file, **dialect, keep_default_na=False, dtype=object)
    except (csv.Error, ValueError) as error:  # pandas' own among them
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


def _read_json(path: Path, needed: Collection[str]) -> Dataset:
    """An object a line, or a list of objects; what an object lacks is None. Python reads them:
    datasets would make a date of each text in a column whose texts look so."""
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
    """Columns as Arrow holds them; or why it cannot."""
    try:
        return Dataset.from_dict(dict(columns))
    except Exception as error:  # Arrow's kinds
        return one_line(error)


def _fault(name: str, cells: list[Any]) -> tuple[int, str] | None:
    """The first cell, counted from 0, that Arrow cannot hold together with those before it, and
    why; None if it holds all."""
    cause = _held({name: cells})
    if isinstance(cause, Dataset):
        return None
    fails = partial(_fails, name, cells)
    return bisect_left(range(1, len(cells)), x=True, key=fails), cause


def _fails(name: str, cells: list[Any], count: int) -> bool:
    return isinstance(_held({name: cells[:count]}), str)


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object, and where it stands, for messages."""
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
