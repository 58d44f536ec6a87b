"""A user's own rows: files, or a dataset on the hub."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
from datasets import Dataset

from collapipe.data.columns import standard
from collapipe.data.files import read_file
from collapipe.data.folders import Splits
from collapipe.data.hub import hub_rows
from collapipe.errors import DataError
from collapipe.sections import DataSettings
from collapipe.seeds import derive

_log = logging.getLogger(__name__)
_HELD_OUT = 10  # a split that is missing gets every tenth row


def read(data: DataSettings, columns: Sequence[str], seed: int) -> Splits:
    """Rows of ``data.train_file`` (and its siblings) or of ``data.name`` with at least ``columns``.

    What the user calls a column otherwise, ``data.COLUMN_column``, gets its name here; other
    columns stay. Labels become their names. A validation or test split that is missing, or whose
    labels the hub keeps secret, is drawn from the training rows. Raises ``DataError`` and
    ``ConfigError``.
    """
    names = columns_of(data, columns)
    with _quiet():
        if data.name is None:
            splits = "train", "validation", "test"
            where = {s: file for s in splits if (file := getattr(data, f"{s}_file"))}
            found = {s: read_file(Path(file), f"data.{s}_file") for s, file in where.items()}
        else:
            found = hub_rows(data.name, data.config, names.get("label"))
            where = {split: f"{data.name}:{split}" for split in found}
        rows = {split: standard(found[split], names, where[split]) for split in found}
    return _complete(rows, where["train"], seed)


def columns_of(data: DataSettings, columns: Sequence[str]) -> dict[str, str]:
    """A task's columns → what the user calls them."""
    return {column: getattr(data, f"{column}_column", column) for column in columns}


def _complete(rows: dict[str, Dataset], where: str, seed: int) -> Splits:
    """All splits: those that are missing get a tenth of the training rows each."""
    train = rows["train"]
    missing = [split for split in ("validation", "test") if split not in rows]
    share = max(1, len(train) // _HELD_OUT)
    if len(train) <= len(missing) * share:
        raise DataError(
            f"{where}: {len(train)} rows are too few to take {' and '.join(missing)} from them; "
            "add rows, or files for data.validation_file and data.test_file"
        )
    drawn = np.random.default_rng(derive(seed, "held out")).permutation(len(train))
    order = np.array(sorted(drawn, key=_only_ones(train).__contains__))  # they come last, and stay
    for split in missing:
        rows[split], order = train.select(np.sort(order[:share])), order[share:]
    if missing:
        rows["train"] = train.select(np.sort(order))
        names = " and ".join(missing)
        _log.warning("%s: %d of %d rows each become %s", where, share, len(train), names)
    return Splits(**rows)


def _only_ones(train: Dataset) -> set[int]:
    """Rows whose label no other row has: where they are held out, it cannot be learned."""
    if "label" not in train.column_names:
        return set()
    labels = train["label"][:]
    rare = {label for label, count in Counter(labels).items() if count == 1}
    return {row for row, label in enumerate(labels) if label in rare}


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no log line where our error says the same."""
    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
