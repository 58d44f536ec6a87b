"""One file of rows: CSV, TSV, JSON lines or text, plain or .gz."""

import csv
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset, Features, Value, load_dataset

from collapipe.data.lines import read_json, text_lines
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
