"""Read a user's rows, from files or from a data set on the hub."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import datasets
import numpy as np
from datasets import Dataset

from collapipe.data.columns import standard
from collapipe.data.files import read_file
from collapipe.data.folders import Splits
from collapipe.data.hub import hub_rows
from collapipe.errors import DataError, NoRowsError
from collapipe.sections import DataSettings
from collapipe.seeds import derive

_log = logging.getLogger(__name__)
_HELD_OUT = 10  # a missing split gets one tenth of the training rows


def read(data: DataSettings, columns: Sequence[str], seed: int, hold_out: bool = True) -> Splits:
    """Return the rows of ``data.train_file`` etc. or of ``data.name``; a split is read when used.

    Columns named by ``data.COLUMN_column`` are renamed to the task's ``columns``; other columns
    stay. Labels become names. With ``hold_out``, a validation or test split is drawn from training
    rows if it is missing or its labels are secret. Raises ``DataError`` or ``ConfigError`` if rows
    cannot be read.
    """
    names = columns_of(data, columns)
    with _quiet():
        where = _files(data)
        hub = {} if data.name is None else hub_rows(data.name, data.config, names.get("label"))
    where |= {split: f"{data.name}:{split}" for split in hub}
    missing = [split for split in ("validation", "test") if hold_out and split not in where]

    def rows(split: str) -> Dataset:
        if split not in where:
            raise NoRowsError(
                f"data.{split}_file is not set, and units on other machines send no rows; set it, "
                "or name such a file in each owner's file"
            )
        with _quiet():
            found = (
                hub[split]()
                if hub
                else read_file(Path(where[split]), f"data.{split}_file", names.values())
            )
            return standard(found, names, where[split])

    @cache
    def cut() -> Mapping[str, Dataset]:
        train = rows("train")
        return _cut(train, missing, where["train"], seed) if missing else {"train": train}

    def held_out(split: str) -> Dataset:
        return cut()[split] if split in missing else rows(split)

    others = (partial(held_out, split) for split in ("validation", "test"))
    return Splits(lambda: cut()["train"], *others, drawn=missing)


def _files(data: DataSettings) -> dict[str, str]:
    splits = "train", "validation", "test"
    return {split: file for split in splits if (file := getattr(data, f"{split}_file"))}


def columns_of(data: DataSettings, columns: Sequence[str]) -> dict[str, str]:
    """Return a task's column → the user's name for it."""
    return {column: getattr(data, f"{column}_column", column) for column in columns}


def _cut(train: Dataset, missing: Sequence[str], where: str, seed: int) -> Mapping[str, Dataset]:
    """Draw the ``missing`` splits, a tenth of the training rows each; return them and the rest."""
    rows = dict[str, Dataset]()
    share = max(1, len(train) // _HELD_OUT)
    if len(train) <= len(missing) * share:
        raise DataError(
            f"{where}: {len(train)} rows are too few to take {' and '.join(missing)} from them; "
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
