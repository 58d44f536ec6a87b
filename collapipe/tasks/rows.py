"""A run's rows, read once in a process that holds server and units."""

import functools
import threading

from datasets import Dataset

from collapipe.config import Settings
from collapipe.errors import ConfigError
from collapipe.tasks.shards import shard
from collapipe.tasks.task import Splits

_loading = threading.Lock()


def load_splits(settings: Settings) -> Splits:
    """The task's rows. Raises ``DataError``."""
    with _loading:
        return _splits(settings)


def load_shard(settings: Settings, unit: int) -> Dataset:
    """A unit's training rows. Raises ``DataError``."""
    partitioner = settings.build("data.partitioner")
    units = settings.federation.num_units
    rows = shard(load_splits(settings).train, partitioner, unit)
    if partitioner.num_partitions != units:
        raise ConfigError(
            f"data.partitioner makes {partitioner.num_partitions} shards, federation.num_units="
            f"{units}; both must be the same, or rows stay unused"
        )
    return rows


@functools.lru_cache(maxsize=1)
def _splits(settings: Settings) -> Splits:
    return settings.task.splits(settings.seed)
