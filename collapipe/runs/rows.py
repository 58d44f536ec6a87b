"""A run's rows and tokeniser; rows are read once in a process that holds server and units."""

import functools
import threading

from datasets import Dataset

from collapipe.config import Settings
from collapipe.data.folders import Splits
from collapipe.data.shards import shards
from collapipe.data.sources import read
from collapipe.errors import ConfigError
from collapipe.seeds import derive
from collapipe.text.tokenizer import Tokenizer

_loading = threading.Lock()


def load_splits(settings: Settings) -> Splits:
    """The task's rows. Raises ``DataError``."""
    with _loading:
        return _splits(settings)


def load_shards(settings: Settings) -> list[Dataset]:
    """Each unit's training rows. Raises ``DataError``."""
    with _loading:
        return _shards(settings)


def build_tokenizer(settings: Settings, train: Dataset) -> Tokenizer:
    """What ``data.tokenizer`` names, else what the model's weights were trained with, else a
    tokeniser of the task's own, trained on ``train``; with the names of the labels."""
    name, task = settings.data.tokenizer or settings.model.own_tokenizer, settings.task
    if name is None:
        tokenizer = task.train_tokenizer(train)
    else:
        from collapipe.models.huggingface.tokenizer import pretrained_tokenizer  # takes seconds

        tokenizer = pretrained_tokenizer(name)
    return tokenizer.with_labels(tuple(task.label_counts(train)))


@functools.lru_cache(maxsize=1)
def _splits(settings: Settings) -> Splits:
    data, task = settings.data, settings.task
    theirs = data.name is not None or data.train_file is not None
    splits = read(data, task.columns, settings.seed) if theirs else task.splits(settings.seed)
    train = (
        splits.train.shuffle(seed=derive(settings.seed, "shuffle"))
        if data.shuffle
        else splits.train
    )
    return Splits(
        _first(train, data.max_train_samples),
        _first(splits.validation, data.max_eval_samples),
        _first(splits.test, data.max_eval_samples),
    )


@functools.lru_cache(maxsize=1)
def _shards(settings: Settings) -> list[Dataset]:
    partitioner = settings.build("data.partitioner")
    units, train = settings.federation.num_units, _splits(settings).train
    _check_column(settings.tree["data"]["partitioner"].get("partition_by"), train)
    divided = shards(train, partitioner, range(units))
    if partitioner.num_partitions != units:
        raise ConfigError(
            f"data.partitioner makes {partitioner.num_partitions} shards, federation.num_units="
            f"{units}; both must be the same, or rows stay unused"
        )
    return divided


def _check_column(name: object, train: Dataset) -> None:
    if isinstance(name, str) and name not in train.column_names:
        there = ", ".join(map(repr, train.column_names))
        raise ConfigError(
            f"data.partitioner.partition_by={name}: the rows have no such column, but {there}; "
            "name one of them, or set partitioner=iid"
        )


def _first(rows: Dataset, count: int | None) -> Dataset:
    return rows if count is None or count >= len(rows) else rows.select(range(count))
