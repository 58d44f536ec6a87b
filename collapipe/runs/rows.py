"""A run's rows: load the server's and the units' rows, and make the units' reports about them.

All functions raise ``DataError`` if rows cannot be read.
"""

import functools
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datasets import Dataset

from collapipe.config import Settings
from collapipe.config.settings import build
from collapipe.data.files import check_file
from collapipe.data.folders import Splits
from collapipe.data.shards import part, shard
from collapipe.data.sources import read
from collapipe.errors import ConfigError, DataError, NoRowsError
from collapipe.seeds import derive
from collapipe.tasks.chat import Chat
from collapipe.tasks.text_task import check_labels, in_order
from collapipe.text.tokenizer import Tokenizer, count_words
from collapipe.validation import returned
from collapipe.wire.messages import RowsReply, Split

if TYPE_CHECKING:  # takes a second to import, and owners' units do not need it
    from flwr_datasets.partitioner import Partitioner

_loading = threading.RLock()  # units of one process share the loaded rows
_BYTES, _FEDERATED = "bytes", "federated"  # tokenisers that are not pretrained
_MOST_COUNTED = 2**22  # words of one unit, all counts together


def load_rows(settings: Settings, split: Split) -> Dataset:
    """Return the rows to evaluate on: ``validation`` between rounds, ``test`` at the end."""
    with _loading:
        return _first(_rows(settings, split), settings.data.max_eval_samples)


def load_server_rows(settings: Settings) -> dict[Split, Dataset]:
    """Return the rows on which a run's server evaluates.

    Also raises ``DataError`` if these rows would be drawn from the units' training rows.
    """
    if draws_held_out(settings):
        raise DataError(
            f"data.name={settings.data.name}: lacks rows for validation or test, and the server "
            "does not draw any from training rows; set evaluation.where=units"
        )
    return {split: load_rows(settings, split) for split in ("validation", "test")}


def draws_held_out(settings: Settings) -> bool:
    """Whether rows to evaluate on are drawn from training rows."""
    with _loading:
        return bool(_splits(settings).drawn)


def load_held_out(settings: Settings, unit: int, split: Split) -> Dataset | None:
    """Return a unit's rows of a split for evaluation; None if it has no such rows.

    These are the owner's rows, or a simulated unit's part of the server's evaluation rows.
    """
    with _loading:
        try:
            rows = load_rows(settings, split)
        except NoRowsError:
            if not settings.has_owners_rows:
                raise
            return None
        own = rows if settings.has_owners_rows else _held_out_part(settings, rows, unit)
        return own if len(own) else None


def check_source(settings: Settings) -> None:
    """Raise ``ConfigError`` or ``DataError`` if training rows are missing, without opening them."""
    with _loading:
        _splits(settings)
    if (file := settings.data.train_file) is not None:
        check_file(Path(file), "data.train_file")


def load_shard(settings: Settings, unit: int) -> Dataset:
    """Return a unit's training rows; a simulated unit gets its part of all rows."""
    with _loading:
        if settings.has_owners_rows:
            return _train(settings)
        partitioner, units = _partitioner(settings), settings.federation.num_units
        own = shard(partitioner, unit)
        if partitioner.num_partitions != units:
            raise ConfigError(
                f"data.partitioner makes {partitioner.num_partitions} shards, federation.num_units="
                f"{units}; both must be the same, or rows stay unused"
            )
        return own


def load_shards(settings: Settings) -> list[Dataset]:
    """Return the training rows of every simulated unit."""
    return [load_shard(settings, unit) for unit in range(settings.federation.num_units)]


def report_rows(settings: Settings, unit: int, wanted: bool = True) -> RowsReply:
    """Return a unit's report about its rows.

    It has word counts only if they are ``wanted`` and the run makes its tokeniser of them.
    """
    task, rows, words = settings.task, load_shard(settings, unit), dict[str, int]()
    labels = task.label_counts(rows)
    check_labels(labels, task.listed_labels)
    if wanted and sends_words(settings):
        words = count_words(task.texts(rows), settings.data.tokenizer_min_rows)
    return RowsReply(unit, len(rows), labels, words)


def sends_words(settings: Settings) -> bool:
    """Whether the run's tokeniser is made of the units' words."""
    return _pretrained(settings) is None


def make_tokenizer(settings: Settings, reports: Collection[RowsReply]) -> Tokenizer:
    """Return the run's tokeniser, with the names of its labels.

    It is the one of ``data.tokenizer``, or the pretrained model's, or made of the units' words;
    ``task.chat_template`` replaces its chat template.
    """
    name = _pretrained(settings)
    if name is None:
        words = sum((Counter(_limited(each.words)) for each in reports), Counter[str]())
        tokenizer = Tokenizer.train_from_counts(words, settings.task.vocabulary)
    elif name == _BYTES:
        tokenizer = Tokenizer.of_bytes()
    else:
        from collapipe.models.huggingface.tokenizer import pretrained_tokenizer  # takes seconds

        tokenizer = pretrained_tokenizer(name)
    if isinstance(settings.task, Chat):
        tokenizer = settings.task.with_template(tokenizer)
    labels = settings.task.listed_labels
    if labels is None:
        labels = in_order({label for each in reports for label in each.labels})
    return replace(tokenizer, labels=labels)


def _limited(words: Mapping[str, int]) -> Mapping[str, int]:
    """Scale the counts of one unit's words down to a sum that a tokeniser counts in seconds."""
    total = sum(words.values())
    if total <= _MOST_COUNTED:
        return words
    return {word: max(1, count * _MOST_COUNTED // total) for word, count in words.items()}


def build_tokenizer(settings: Settings) -> Tokenizer:
    """Return a run's tokeniser without running it, from the rows of all simulated units."""
    units = range(settings.federation.num_units)
    return make_tokenizer(settings, [report_rows(settings, unit) for unit in units])


def _pretrained(settings: Settings) -> str | None:
    name = settings.data.tokenizer or settings.model.own_tokenizer
    return None if name == _FEDERATED else name


@functools.lru_cache(maxsize=1)
def _splits(settings: Settings) -> Splits:
    data, task = settings.data, settings.task
    if data.brought:
        return read(data, task.columns, settings.seed, hold_out=not settings.has_owners_rows)
    return returned(task.splits(settings.seed), Splits, f"task: {type(task).__qualname__}.splits")


def _rows(settings: Settings, split: Split | Literal["train"]) -> Dataset:
    """Return all rows of a split. Raises ``ConfigError`` if the task's own rows do not fit it;
    ``read`` has checked those of a user's files."""
    task = settings.task
    rows = returned(getattr(_splits(settings), split), Dataset, f"task={task.name}: split {split}")
    missing = {*task.columns} - {*rows.column_names}
    if missing and not settings.data.brought:
        raise ConfigError(
            f"task={task.name}: rows of the split {split} lack the column {min(missing)}, which "
            "the task's columns name"
        )
    if not rows:
        raise NoRowsError(f"task={task.name}: the split {split} has no rows")
    return rows


@functools.lru_cache(maxsize=1)
def _train(settings: Settings) -> Dataset:
    data, train = settings.data, _rows(settings, "train")
    if data.shuffle:
        train = train.shuffle(seed=derive(settings.seed, "shuffle"))
    return _first(train, data.max_train_samples)


@functools.lru_cache(maxsize=1)
def _partitioner(settings: Settings) -> "Partitioner":
    """Return the partitioner with its rows, which can be set only once."""
    partitioner = _built(settings.tree["data"]["partitioner"], _train(settings))
    partitioner.dataset = _train(settings)
    return partitioner


def _held_out_part(settings: Settings, rows: Dataset, unit: int) -> Dataset:
    """Return a simulated unit's part of evaluation rows, split in the same way as training rows.

    Rows of a natural id belong to the unit that trains on that id. Otherwise parts have no minimum
    size.
    """
    chosen = settings.tree["data"]["partitioner"]
    if "min_partition_size" in chosen:
        chosen = {**chosen, "min_partition_size": 0}
    partitioner = _built(chosen, rows)
    from flwr_datasets.partitioner import NaturalIdPartitioner

    if isinstance(partitioner, NaturalIdPartitioner):
        by = chosen["partition_by"]
        own = set(load_shard(settings, unit)[by])
        return rows.select([row for row, value in enumerate(rows[by]) if value in own])
    partitioner.dataset = rows
    return part(partitioner, unit)


def _built(chosen: Mapping[str, Any], rows: Dataset) -> "Partitioner":
    """Build a partitioner. Raises ``ConfigError`` if the ``rows`` lack the column that it reads."""
    partitioner: Partitioner = build("data.partitioner", chosen)
    name = chosen.get("partition_by")
    if isinstance(name, str) and name not in rows.column_names:
        there = ", ".join(map(repr, rows.column_names))
        raise ConfigError(
            f"data.partitioner.partition_by={name}: the rows have no such column, but {there}; "
            "name one of them, or set partitioner=iid"
        )
    return partitioner


def _first(rows: Dataset, count: int | None) -> Dataset:
    return rows if count is None or count >= len(rows) else rows.select(range(count))
