"""Shards cover the rows once; batches of any step follow from the step alone."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, LinearPartitioner
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import DataError
from collapipe.tasks.shards import batch_rows, shard

sizes = st.integers(1, 40)


class OneForAll:
    """A user's own partitioner, which leaves all units but the first nothing."""

    dataset: Dataset

    def load_partition(self, unit: int) -> Dataset:
        """All rows for unit 0."""
        return self.dataset.select(range(len(self.dataset) if unit == 0 else 0))


def numbered(num_rows: int) -> Dataset:
    """Rows that know their number and a class."""
    numbers = range(num_rows)
    return Dataset.from_dict({"number": list(numbers), "label": [n % 3 for n in numbers]})


@pytest.mark.parametrize(
    "build",
    [
        lambda: IidPartitioner(4),
        lambda: LinearPartitioner(4),
        lambda: DirichletPartitioner(4, partition_by="label", alpha=1.0, seed=1),
    ],
)
def test_shards_cover_the_rows_once(build: object) -> None:
    """Though each unit asks a partitioner of its own."""
    assert callable(build)
    shards = [shard(numbered(200), build(), unit)["number"] for unit in range(4)]
    assert sorted(number for rows in shards for number in rows) == list(range(200))


@pytest.mark.parametrize(
    ("partitioner", "unit", "words"),
    [
        (OneForAll(), 3, ["unit 3", "none of 2 rows"]),
        (IidPartitioner(4), 3, ["unit 3", "cannot cut 2 rows"]),
        (IidPartitioner(2), 2, ["unit 2", "cannot cut 2 rows"]),
        (DirichletPartitioner(2, partition_by="topic", alpha=1.0), 0, ["unit 0", "topic"]),
    ],
)
def test_bad_shards_are_named(partitioner: object, unit: int, words: list[str]) -> None:
    """One line with the unit, the rows and the way out."""
    with pytest.raises(DataError) as caught:
        shard(numbered(2), partitioner, unit)
    message = str(caught.value)
    assert all(word in message for word in [*words, type(partitioner).__name__])
    assert message.endswith("lower federation.num_units or set another data.partitioner")
    assert "\n" not in message


@given(sizes, sizes, st.integers(0, 2**62))
def test_every_epoch_has_every_row_once(num_rows: int, batch_size: int, seed: int) -> None:
    """Joined, the batches are one permutation after another."""
    size = min(batch_size, num_rows)
    batches = [batch_rows(num_rows, batch_size, step, seed) for step in range(2 * num_rows)]
    assert {len(batch) for batch in batches} == {size}
    stream = np.concatenate(batches)
    for epoch in stream[: len(stream) // num_rows * num_rows].reshape(-1, num_rows):
        assert sorted(epoch) == list(range(num_rows))
    assert set(Counter(stream.tolist()).values()) == {2 * size}


@given(sizes, sizes, st.integers(0, 10**9), st.integers(0, 2**62))
def test_a_step_needs_no_history(num_rows: int, batch_size: int, step: int, seed: int) -> None:
    """A resumed run takes the batches that the uninterrupted one would have taken."""
    batch = batch_rows(num_rows, batch_size, step, seed)
    assert np.array_equal(batch, batch_rows(num_rows, batch_size, step, seed))
    assert batch.min() >= 0
    assert batch.max() < num_rows


def test_epochs_and_seeds_differ() -> None:
    """Rows do not come in one order for ever."""
    orders = [batch_rows(50, 50, step, seed).tolist() for step in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
