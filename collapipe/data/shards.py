"""Which rows a unit holds, and which of them a step takes."""

import threading
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.errors import DataError
from collapipe.seeds import derive

if TYPE_CHECKING:  # it draws, and takes a second to import; owners' units do without
    from flwr_datasets.partitioner import Partitioner

_BUCKET = 8  # batches: the padding left is small, a batch's rows are still drawn from many
WAY_OUT = "lower federation.num_units or set another data.partitioner"
_quiet = threading.Lock()  # standard error is one for all threads


def shard(partitioner: "Partitioner", unit: int) -> Dataset:
    """The part of the partitioner's rows that is unit ``unit``'s.

    Raises ``DataError`` where it cannot divide these rows or leaves the unit without any.
    """
    mine, num_rows = part(partitioner, unit), len(partitioner.dataset)
    if len(mine) == 0:
        kind = type(partitioner).__name__
        raise DataError(f"unit {unit}: {kind} leaves it none of {num_rows} rows; {WAY_OUT}")
    return mine


def part(partitioner: "Partitioner", unit: int) -> Dataset:
    """As ``shard``; of few rows a unit may have none."""
    # Partitioners print bars, and warn of each draw that they repeat; what matters they raise.
    with _quiet, redirect_stderr(StringIO()):
        return _part(partitioner, unit, len(partitioner.dataset))


def _part(partitioner: "Partitioner", unit: int, num_rows: int) -> Dataset:
    kind = type(partitioner).__name__
    try:
        count = partitioner.num_partitions
        mine = partitioner.load_partition(unit) if unit < count else None
    except Exception as error:  # each partitioner has its own kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"unit {unit}: {kind} cannot divide {num_rows} rows ({cause}); {WAY_OUT}"
        ) from error
    if mine is None:
        raise DataError(f"unit {unit}: {kind} makes {count} shards of {num_rows} rows; {WAY_OUT}")
    return mine


def batch_rows(lengths: Sequence[int], batch_size: int, step: int, seed: int) -> NDArray[np.int64]:
    """Indices of the rows in batch ``step``, counted from 0: int64 [min(batch_size, rows)].

    An epoch is a permutation of the rows, divided into whole batches: the rows left over, fewer
    than a batch has, sit out this epoch, another time others do. ``_BUCKET`` batches at a time are
    filled by length, the shortest rows first, so that a long row is padded to by rows that are
    nearly as long; an epoch's batches come in random order. A pure function: a resumed run needs no
    state but its step.
    """
    size = min(batch_size, len(lengths))
    num_batches = len(lengths) // size
    epoch, place = divmod(step, num_batches)
    order = np.random.default_rng(derive(seed, "epoch", epoch)).permutation(len(lengths))
    batches = np.random.default_rng(derive(seed, "batches", epoch)).permutation(num_batches)
    bucket, batch = divmod(int(batches[place]), _BUCKET)
    last = min((bucket + 1) * _BUCKET, num_batches)
    drawn = order[bucket * _BUCKET * size : last * size]
    by_length = drawn[np.argsort(np.asarray(lengths)[drawn], kind="stable")]
    return by_length[batch * size : (batch + 1) * size]
