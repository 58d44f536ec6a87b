"""A run's rows, read once in a process that holds server and units."""

import functools
import threading

from datasets import Dataset

from collapipe.config import Settings
from collapipe.tasks.shards import shard
from collapipe.tasks.task import Splits

_loading = threading.Lock()


def load_splits(settings: Settings) -> Splits:
    """The task's rows. Raises ``DataError``."""
    with _loading:
        return _splits(settings)


def load_shard(settings: Settings, unit: int) -> Dataset:
    """A unit's training rows. Raises ``DataError``."""
    return shard(load_splits(settings).train, settings.build("data.partitioner"), unit)


@functools.lru_cache(maxsize=1)
def _splits(settings: Settings) -> Splits:
    return settings.task.splits(settings.seed)
