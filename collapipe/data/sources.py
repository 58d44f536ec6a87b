"""Read a user's rows, from files or the hub, as the columns and types that a task needs."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, concatenate_datasets

from collapipe.data.conversations import MESSAGES, read_conversations
from collapipe.data.files import read_file
from collapipe.data.folders import OUTSIDE, Splits, fault_of
from collapipe.data.hub import hub_rows
from collapipe.errors import DataError, NoRowsError
from collapipe.formatting import counted
from collapipe.sections import DataSettings
from collapipe.seeds import derive
from collapipe.text.vocabulary import fault_of_label

_log = logging.getLogger(__name__)
_SHOWN = 12  # names in a message
_EMPTY = "is empty; fill it in, or leave the row out"
_Named = Callable[[Any], str]  # an item as text
_SPLITS = "train", "validation", "test"
_HELD_OUT = 10  # a missing split gets one tenth of the training rows


def read(data: DataSettings, columns: Sequence[str], seed: int, hold_out: bool = True) -> Splits:
    """Return the rows of ``data.train_file`` etc. or of ``data.name``; a split is read when used.

    Columns named by ``data.COLUMN_column`` are renamed to the task's ``columns``; other columns
    stay. Labels become names. With ``hold_out``, a validation or test split is drawn from training
    rows if it is missing or its labels are secret. Raises ``DataError`` or ``ConfigError`` if rows
    cannot be read.
    """
    names = columns_of(data, columns)
    where = {split: file for split in _SPLITS if (file := getattr(data, f"{split}_file"))}
    with _quiet():
        hub = {} if data.name is None else hub_rows(data.name, data.config, names.get("label"))
    where |= {split: f"{data.name}:{split}" for split in hub}
    missing = [split for split in ("validation", "test") if hold_out and split not in where]

    def rows(split: str) -> Dataset:
        if split not in where:
            raise NoRowsError(
                f"data.{split}_file is not set, and units on other machines send no rows; set it, "
                "or name such a file in each owner's file"
            )
        in_file = partial(read_file, Path(where[split]), f"data.{split}_file", names.values())
        with _quiet():
            return standard(hub.get(split, in_file)(), names, where[split])

    @cache
    def cut() -> Mapping[str, Dataset]:
        return _cut(rows("train"), missing, where["train"], seed)

    def read_once(split: str) -> Dataset:
        return cut()[split] if missing and split in ("train", *missing) else rows(split)

    return Splits(*(partial(read_once, split) for split in _SPLITS), drawn=missing)


def columns_of(data: DataSettings, columns: Sequence[str]) -> dict[str, str]:
    """Return a task's column → the user's name for it."""
    return {column: getattr(data, f"{column}_column", column) for column in columns}


def _cut(train: Dataset, missing: Sequence[str], where: str, seed: int) -> Mapping[str, Dataset]:
    """Draw the ``missing`` splits, a tenth of the training rows each; return them and the rest."""
    rows = dict[str, Dataset]()
    share = max(1, len(train) // _HELD_OUT)
    if len(train) <= len(missing) * share:
        raise DataError(
            f"{where}: too few rows ({len(train)}) to take {' and '.join(missing)} from them; "
            "add rows, or files for data.validation_file and data.test_file"
        )
    drawn = np.random.default_rng(derive(seed, "held out")).permutation(len(train))
    order = np.array(sorted(drawn, key=_only_ones(train).__contains__))  # last, so that they stay
    for split in missing:
        rows[split], order = train.select(np.sort(order[:share])), order[share:]
    names = " and ".join(missing)
    _log.warning("%s: %d of %d rows each become %s", where, share, len(train), names)
    return {"train": train.select(np.sort(order)), **rows}


def _only_ones(train: Dataset) -> set[int]:
    """Return the rows whose label no other row has; training needs them to learn the label."""
    if "label" not in train.column_names:
        return set()
    labels = train["label"][:]
    rare = {label for label, count in Counter(labels).items() if count == 1}
    return {row for row, label in enumerate(labels) if label in rare}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and log lines of ``datasets``; errors report the same."""
    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def standard(rows: Dataset, names: Mapping[str, str], where: str) -> Dataset:
    """Rename the columns of ``rows`` from the values of ``names`` to its keys, and convert them.

    Tokens and tags become lists of texts, conversations lists of messages, other columns texts;
    label numbers become names. Another column that has the name of a key is removed. Raises
    ``DataError``, which names ``where``, the column and the row (from 1), for an invalid value.
    """
    flat = rows.flatten()
    if MESSAGES in names:
        return _with_other_columns(flat, names, read_conversations(flat, names, where))
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
                f"rename the column, or set data.{column}_column for the run",
                f"its rows have no column that data.{column}_column names",
            )
    read = {column: _read(flat, column, name, where) for column, name in names.items()}
    if "tokens" in read and "tags" in read:
        _check_tags(read["tokens"], read["tags"], where)
    return _with_other_columns(flat, names, Dataset.from_dict(read))


def _with_other_columns(flat: Dataset, names: Mapping[str, str], own: Dataset) -> Dataset:
    """Return the task's columns ``own`` with the other columns of ``flat``."""
    replaced = {*names, *names.values(), *own.column_names} & set(flat.column_names)
    others = flat.remove_columns(sorted(replaced))
    return concatenate_datasets([others, own], axis=1) if others.column_names else own


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
    if value is None or value != value:  # NaN
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
                f"{where}: row {number} has {counted(len(words), 'token')} and "
                f"{counted(len(row), 'tag')}; each token needs one tag"
            )
        for before, tag in pairwise([OUTSIDE, *row]):
            if fault := fault_of(tag, before):
                raise DataError(f"{where}: row {number}: {fault}", "its tags are not IOB2")
