"""Select a unit's rows, and the rows of a step's batch."""

import threading
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.errors import DataError
from collapipe.formatting import counted
from collapipe.seeds import derive
from collapipe.validation import returned

if TYPE_CHECKING:  # takes a second to import, and owners' units do not need it
    from flwr_datasets.partitioner import Partitioner

_BUCKET = 8  # batches; little padding remains, and a batch's rows are still drawn from many
WAY_OUT = "lower federation.num_units or set another data.partitioner"
_quiet = threading.Lock()  # all threads share standard error


def shard(partitioner: "Partitioner", unit: int) -> Dataset:
    """Return a unit's part of the partitioner's rows.

    Raises ``DataError`` if the rows cannot be divided, or the unit would get none.
    """
    rows, num_rows = part(partitioner, unit), len(partitioner.dataset)
    if len(rows) == 0:
        kind = type(partitioner).__name__
        raise DataError(f"unit {unit}: {kind} gives it 0 of {counted(num_rows, 'row')}; {WAY_OUT}")
    return rows


def part(partitioner: "Partitioner", unit: int) -> Dataset:
    """Return a unit's part as ``shard`` does, but allow an empty part."""
    kind, num_rows = type(partitioner).__name__, len(partitioner.dataset)
    try:
        # Hide progress bars and warnings of repeated draws; real faults are raised.
        with _quiet, redirect_stderr(StringIO()):
            count = partitioner.num_partitions
            rows = partitioner.load_partition(unit) if unit < count else None
    except Exception as error:  # each partitioner raises its own classes
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"unit {unit}: {kind} cannot divide {counted(num_rows, 'row')} ({cause}); {WAY_OUT}"
        ) from error
    if rows is None:
        made = f"{counted(count, 'shard')} of {counted(num_rows, 'row')}"
        raise DataError(f"unit {unit}: {kind} makes {made}; {WAY_OUT}")
    returned(rows, Dataset, f"data.partitioner: {kind}.load_partition")
    if missing := {*partitioner.dataset.column_names} - {*rows.column_names}:
        raise DataError(
            f"unit {unit}: {kind} leaves out the column {min(missing)}; return rows of its dataset"
        )
    return rows


def batch_rows(lengths: Sequence[int], batch_size: int, step: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of the rows in batch ``step`` (from 0), int64 [min(batch_size, rows)].

    An epoch is a permutation of the rows, divided into whole batches. Remaining rows, fewer than a
    batch, are left out of this epoch; each epoch leaves out others.

    Rows of ``_BUCKET`` batches at a time are sorted by length, so that rows of similar lengths
    share a batch and little padding is needed. Batches of an epoch have a random order. The
    function is pure: a resumed run needs only its step.
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
