"""Which rows a unit holds, and which of them a step takes."""

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from collapipe.errors import DataError
from collapipe.seeds import derive

WAY_OUT = "lower federation.num_units or set another data.partitioner"


def shard(rows: Dataset, partitioner: Partitioner, unit: int) -> Dataset:
    """The rows of a unit, counted from 0.

    ``partitioner`` must be a fresh one, for it takes rows only once. Raises ``DataError`` where it
    cannot cut these rows or leaves the unit without any.
    """
    kind = type(partitioner).__name__
    try:
        partitioner.dataset = rows
        mine = partitioner.load_partition(unit)
    except Exception as error:  # each partitioner has its own kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"unit {unit}: {kind} cannot cut {len(rows)} rows ({cause}); {WAY_OUT}"
        ) from error
    if len(mine) == 0:
        raise DataError(f"unit {unit}: {kind} leaves it none of {len(rows)} rows; {WAY_OUT}")
    return mine


def batch_rows(num_rows: int, batch_size: int, step: int, seed: int) -> NDArray[np.int64]:
    """Indices of the rows in batch ``step``, counted from 0: int64 [min(batch_size, num_rows)].

    Batches are cut from an endless row of epochs, each a permutation of its own, so that every
    row comes up equally often. A pure function: a resumed run needs no state but its step.
    """
    size = min(batch_size, num_rows)
    positions = np.arange(step * size, (step + 1) * size)
    epochs = range(positions[0] // num_rows, positions[-1] // num_rows + 1)
    orders = [_order(num_rows, epoch, seed) for epoch in epochs]
    return np.concatenate(orders)[positions - epochs[0] * num_rows]


def _order(num_rows: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(derive(seed, "epoch", epoch)).permutation(num_rows)
