"""Shards cover all rows once; the batch of a step depends only on the step and the seed."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    LinearPartitioner,
    NaturalIdPartitioner,
)
from hypothesis import given
from hypothesis import strategies as st

from collapipe.data.shards import batch_rows, shard
from collapipe.errors import ConfigError, DataError

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**62)
row_lengths = st.lists(st.integers(1, 99), min_size=1, max_size=40)


class OneForAll:
    """A user's partitioner, which gives all rows to the first unit."""

    dataset: Dataset
    num_partitions = 4

    def load_partition(self, unit: int) -> Dataset:
        """All rows for unit 0, no rows for other units."""
        return self.dataset.select(range(len(self.dataset) if unit == 0 else 0))


def numbered(num_rows: int) -> Dataset:
    """Rows with their number and one of three labels."""
    numbers = range(num_rows)
    return Dataset.from_dict({"number": list(numbers), "label": [n % 3 for n in numbers]})


def shards(rows: Dataset, partitioner: Any, units: Iterable[int]) -> list[Dataset]:
    partitioner.dataset = rows
    return [shard(partitioner, unit) for unit in units]


@pytest.mark.parametrize(
    "build",
    [
        lambda: IidPartitioner(4),
        lambda: LinearPartitioner(4),
        lambda: DirichletPartitioner(4, partition_by="label", alpha=1.0, seed=1),
    ],
)
def test_shards_cover_the_rows_once(build: Callable[[], object]) -> None:
    """A second partitioner that is built in the same way gives the same shards."""
    held = [rows["number"][:] for rows in shards(numbered(200), build(), range(4))]
    assert sorted(number for rows in held for number in rows) == list(range(200))
    assert [rows["number"][:] for rows in shards(numbered(200), build(), range(4))] == held


def test_each_natural_id_is_the_shard_of_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """Units are in the order of the ids, and no progress bar is printed."""
    partitioner = NaturalIdPartitioner(partition_by="label")
    held = shards(numbered(7), partitioner, range(3))
    assert [rows["number"][:] for rows in held] == [[0, 3, 6], [1, 4], [2, 5]]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("partitioner", "unit", "words"),
    [
        (OneForAll(), 3, ["unit 3", "0 of 2 rows"]),
        (IidPartitioner(4), 3, ["unit 3", "2 rows"]),
        (IidPartitioner(2), 2, ["unit 2", "makes 2 shards of 2 rows"]),
        (NaturalIdPartitioner(partition_by="label"), 2, ["unit 2", "makes 2 shards"]),
        (NaturalIdPartitioner(partition_by="user"), 0, ["unit 0", "user", "'number', 'label'"]),
        (DirichletPartitioner(2, partition_by="topic", alpha=1.0), 0, ["unit 0", "topic"]),
    ],
)
def test_a_shard_that_cannot_be_made_is_a_one_line_error(
    partitioner: object, unit: int, words: list[str]
) -> None:
    """The error names the unit, the number of rows and what to change."""
    with pytest.raises(DataError) as caught:
        shards(numbered(2), partitioner, [unit])
    message = str(caught.value)
    assert all(word in message for word in [*words, type(partitioner).__name__])
    assert message.endswith("lower federation.num_units or set another data.partitioner")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rows: [*rows], r"OneForAll\.load_partition returned list, expected Dataset$"),
        (iter, r"OneForAll\.load_partition returned generator, expected Dataset$"),
        (lambda rows: rows.remove_columns("label"), "^unit 0: OneForAll .* the column label; "),
    ],
)
def test_a_partitioner_that_returns_no_rows_of_its_dataset_is_refused(
    answer: Callable[[Dataset], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneForAll, "load_partition", lambda self, _: answer(self.dataset))
    with pytest.raises(ConfigError, match=message):
        shards(numbered(9), OneForAll(), [0])


@given(row_lengths, sizes, seeds)
def test_an_epoch_has_each_row_at_most_once(lengths: list[int], batch_size: int, seed: int) -> None:
    """All batches are full; only rows that fill no further batch are left out."""
    size = min(batch_size, len(lengths))
    count = len(lengths) // size
    for epoch in range(3):
        steps = range(epoch * count, (epoch + 1) * count)
        batches = [batch_rows(lengths, batch_size, step, seed) for step in steps]
        assert {len(batch) for batch in batches} == {size}
        rows = np.concatenate(batches)
        assert len(set(rows.tolist())) == len(rows) > len(lengths) - size
        assert rows.min() >= 0
        assert rows.max() < len(lengths)


@given(row_lengths, sizes, st.integers(0, 10**9), seeds)
def test_a_batch_depends_only_on_the_step_and_the_seed(
    lengths: list[int], batch_size: int, step: int, seed: int
) -> None:
    """A resumed run therefore gets the same batches as an uninterrupted one."""
    batch = batch_rows(lengths, batch_size, step, seed)
    assert np.array_equal(batch, batch_rows(tuple(lengths), batch_size, step, seed))


def test_each_row_is_left_out_about_equally_often() -> None:
    """In each of 400 epochs, 2 of 8 rows are left out of the batch of 6."""
    steps = [batch_rows([1] * 8, 6, step, seed=3) for step in range(400)]
    times = np.bincount(np.concatenate(steps), minlength=8)
    assert times.sum() == 2400
    assert abs(times - 300).max() < 40


def test_the_order_of_rows_differs_between_epochs_and_seeds() -> None:
    found = {tuple(batch_rows([1] * 50, 50, step, seed)) for step in (0, 1) for seed in (0, 1)}
    assert len(found) == 4


def test_rows_of_similar_length_share_batches() -> None:
    """Batches need less than 0.3 times the padding of random batches; their lengths are mixed."""
    random = np.random.default_rng(0)
    lengths = np.minimum(300, random.lognormal(3, 0.8, 640).astype(int) + 1)
    bucketed = [lengths[batch_rows(lengths, 16, step, seed=1)] for step in range(40)]
    shuffled = lengths[random.permutation(640)].reshape(40, 16)
    assert padding(bucketed) < 0.3 * padding(shuffled)
    rises = np.diff([batch.max() for batch in bucketed]) > 0
    assert 10 < rises.sum() < 29


def padding(batches: object) -> int:
    """The number of padded positions."""
    return sum(int((batch.max() - batch).sum()) for batch in np.asarray(batches))
