"""Convert a user's rows to the columns and types that a task needs."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from datasets import ClassLabel, Dataset, concatenate_datasets

from collapipe.data.folders import OUTSIDE, fault_of
from collapipe.errors import DataError
from collapipe.text.vocabulary import fault_of_label

_SHOWN = 12  # names in a message
_EMPTY = "is empty; fill it in, or leave the row out"
_Named = Callable[[Any], str]  # an item as text


def standard(rows: Dataset, names: Mapping[str, str], where: str) -> Dataset:
    """Rename the columns of ``rows`` from the values of ``names`` to its keys, and convert them.

    Tokens and tags become lists of texts, other columns texts; label numbers become names. Another
    column that has the name of a key is removed. Raises ``DataError``, which names ``where``, the
    column and the row (from 1), for an invalid value.
    """
    flat = rows.flatten()
    for column, name in names.items():
        if name not in flat.column_names:
            there = ", ".join(map(repr, flat.column_names[:_SHOWN]))
            more = ", …" if len(flat.column_names) > _SHOWN else ""
            if len(flat.column_names) == 1 and (";" in there or "\\t" in there):
                raise DataError(
                    f"{where}: its one column is {there}; separate cells by commas, or by tabs in "
                    "a file that ends in .tsv"
                )
            raise DataError(
                f"{where}: there is no column {name!r}, but {there}{more}; "
                f"set data.{column}_column",
                f"its rows have no column that data.{column}_column names",
            )
    read = {column: _read(flat, column, name, where) for column, name in names.items()}
    if "tokens" in read and "tags" in read:
        _check_tags(read["tokens"], read["tags"], where)
    gone = {*names, *names.values()} & set(flat.column_names)
    others, mine = flat.remove_columns(sorted(gone)), Dataset.from_dict(read)
    return concatenate_datasets([others, mine], axis=1) if others.column_names else mine


def _read(rows: Dataset, column: str, name: str, where: str) -> list[Any]:
    feature = rows.features[name]
    inner = getattr(feature, "feature", feature)  # a list's
    named = _name_of(inner) if isinstance(inner, ClassLabel) else _text
    reads = {"tokens": _items, "tags": _items, "label": _label}
    read: Callable[[Any, _Named], Any] = reads.get(column, _one)
    values = []
    for number, value in enumerate(rows[name][:], 1):
        try:
            values.append(read(value, named))
        except ValueError as error:
            message = f"{where}: column {name!r}, row {number}: {error}"
            raise DataError(message, f"a {column} of its rows is no {column}") from error
    return values


def _one(value: Any, named: _Named) -> str:
    text = named(value)
    if not text.strip():
        raise ValueError(_EMPTY)
    return text


def _label(value: Any, named: _Named) -> str:
    name = _one(value, named).strip()
    if fault := fault_of_label(name):
        raise ValueError(fault)
    return name


def _items(value: Any, named: _Named) -> list[str]:
    """Return a cell's items as texts; a cell of a CSV file is split at blanks."""
    if isinstance(value, str):
        if re.match(r"\[\S.*,.*\]$", value):  # a list as Python prints it
            raise ValueError("holds a printed list; put blanks between items, or write JSON lines")
        value = value.split()
    if value is not None and not isinstance(value, list):
        kind = type(value).__name__
        raise ValueError(f"holds a {kind}, not a list; write a list, or texts with blanks between")
    if not value:
        raise ValueError(_EMPTY)
    return [named(item) for item in value]


def _text(value: Any) -> str:
    if value is None:
        raise ValueError(_EMPTY)
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(f"holds a {kind}, not a text; choose another column, or write texts")
    return str(value)


def _name_of(labels: ClassLabel) -> _Named:
    def name(value: Any) -> str:
        if value is None or not 0 <= value < len(labels.names):  # -1 on the hub: secret
            raise ValueError(f"has no label ({value}); leave the row out, or write rows to files")
        return str(labels.names[value])

    return name


def _check_tags(tokens: list[list[str]], tags: list[list[str]], where: str) -> None:
    for number, (words, row) in enumerate(zip(tokens, tags, strict=True), 1):
        if len(words) != len(row):
            raise DataError(
                f"{where}: row {number} has {len(words)} tokens and {len(row)} tags; each token "
                "needs one tag"
            )
        for before, tag in pairwise([OUTSIDE, *row]):
            if fault := fault_of(tag, before):
                raise DataError(f"{where}: row {number}: {fault}", "its tags are not IOB2")
