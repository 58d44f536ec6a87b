"""One file of rows: CSV, TSV, JSON lines or text, plain or .gz."""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset, Features, Value, load_dataset

from collapipe.errors import ConfigError, DataError

# Not a cell is empty because it says NA, and in TSV a quotation mark is text.
_CSV = {"path": "csv", "sep": ",", "quoting": csv.QUOTE_MINIMAL, "keep_default_na": False}
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    ".csv": _CSV,
    ".tsv": {**_CSV, "sep": "\t", "quoting": csv.QUOTE_NONE},
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".txt": {"path": "text"},
}


def read_file(path: Path, option: str) -> Dataset:
    """All rows, in memory; blank lines of a text are left out.

    Raises ``ConfigError`` for a suffix that is not known, ``DataError`` for what cannot be read.
    """
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ConfigError(f"{option}={path}: the suffix must be one of {known}, and .gz behind it")
    if not path.is_file():
        raise DataError(f"{option}={path}: there is no such file; correct the path")
    arguments = _FORMATS[suffix]
    rows = read_json(path) if arguments["path"] == "json" else _read(path, arguments)
    if len(rows) == 0:
        raise DataError(f"{path}: has no rows; add some, or set another {option}")
    return rows


def _read(path: Path, arguments: Mapping[str, Any]) -> Dataset:
    # Nothing is left in a cache, which would serve a file's old rows once it has changed.
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "rows"
        _unpack(path, plain)
        return _load(path, plain, arguments)


def _unpack(path: Path, plain: Path) -> None:
    """Copy what is UTF-8, without the mark that some programs put before it."""
    with plain.open("w", encoding="utf-8", newline="") as target:
        target.writelines(text_lines(path))
    if plain.stat().st_size == 0:
        raise DataError(f"{path}: is empty; fetch the file again, or add rows")


def _load(path: Path, plain: Path, arguments: Mapping[str, Any]) -> Dataset:
    """Rows of ``plain``, which messages call ``path``."""
    kind = arguments["path"]
    more = {"features": _features(path, plain, arguments)} if kind == "csv" else {}
    try:
        rows = load_dataset(
            **arguments,
            **more,
            data_files=str(plain),
            split="train",
            cache_dir=str(plain.parent),
            keep_in_memory=True,
        )
    except Exception as error:  # each format has its own kinds
        raise DataError(f"{path}: cannot be read ({_cause(error)}); correct the file") from error
    if kind == "text":
        return rows.select([n for n, line in enumerate(rows["text"]) if line.strip()])
    return rows


def _features(path: Path, plain: Path, arguments: Mapping[str, Any]) -> Features:
    """Every column as text, as it stands: no 007 becomes 7."""
    dialect = {"delimiter": arguments["sep"], "quoting": arguments["quoting"]}
    try:
        with plain.open(encoding="utf-8", newline="") as lines:
            filled = (row for row in csv.reader(lines, **dialect) if row)
            head, first = [*islice(filled, 2), [], []][:2]
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read ({error}); correct the file") from error
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
    return Features({name: Value("string") for name in names})


def _cause(error: BaseException) -> str:
    """The first line of what lies beneath."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


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
