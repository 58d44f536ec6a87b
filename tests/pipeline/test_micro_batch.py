"""Micro-batches contain each sample once, with its targets and little padding."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.tensors import IGNORED, Batch
from pipeline.micro_batch import split

Sample = tuple[tuple[int, ...], tuple[int, ...]]  # real tokens of source and target
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)
samples = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=12)
counts = st.integers(1, 15)


def batch_of(samples: list[Sample]) -> Batch:
    """A batch padded on the right; the padding of inputs is a valid id."""
    sources, targets = zip(*samples, strict=True)
    mask = _padded([[1] * len(source) for source in sources], 0).bool()
    return Batch(_padded(sources, 7), mask, _padded(targets, IGNORED))


def samples_of(batch: Batch) -> list[Sample]:
    """The samples of a batch; the inverse of ``batch_of``."""
    return [
        (tuple(inputs[mask].tolist()), tuple(targets[targets != IGNORED].tolist()))
        for inputs, mask, targets in zip(batch.inputs, batch.mask, batch.targets, strict=True)
    ]


@given(samples, counts)
def test_every_sample_is_in_one_micro_batch_with_its_targets(
    samples: list[Sample], count: int
) -> None:
    """No sample is lost, repeated, truncated or paired with other targets."""
    batch = batch_of(samples)
    micro_batches = split(batch, count)
    assert sorted(sample for part in micro_batches for sample in samples_of(part)) == sorted(
        samples
    )
    assert sum(part.num_targets for part in micro_batches) == batch.num_targets


@given(samples, counts)
def test_sizes_differ_by_one_at_most(samples: list[Sample], count: int) -> None:
    """Larger micro-batches come first; with fewer samples than m, each has one sample."""
    sizes = [part.num_samples for part in split(batch_of(samples), count)]
    assert len(sizes) == min(count, len(samples))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sum(sizes) == len(samples)


@given(samples, counts)
def test_a_micro_batch_is_as_wide_as_its_longest_sample(samples: list[Sample], count: int) -> None:
    """Inputs and targets are trimmed; samples of similar length share a micro-batch."""
    micro_batches = split(batch_of(samples), count)
    for part in micro_batches:
        assert part.inputs.shape == part.mask.shape
        assert part.mask.shape[1] == int(part.mask.sum(1).max())
        assert part.targets.shape[1] == int((part.targets != IGNORED).sum(1).max())
    for longer, shorter in pairwise(micro_batches):
        assert longer.mask.sum(1).min() >= shorter.mask.sum(1).max()


def test_targets_may_have_gaps() -> None:
    """If only the first piece of each word has a label, columns keep their places."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    targets = torch.tensor([[IGNORED, 3, IGNORED, 4], [IGNORED, 9, IGNORED, IGNORED]])
    first, second = split(Batch(ids, ids > 0, targets), 2)
    assert torch.equal(first.targets, targets[:1])
    assert torch.equal(second.targets, targets[1:, :2])
    assert torch.equal(second.inputs, ids[1:, :2])


def test_a_micro_batch_without_targets_keeps_a_column() -> None:
    """The column gives it the same number of dimensions as other micro-batches; its loss is 0."""
    targets = torch.tensor([[3, 4], [IGNORED, IGNORED]])
    second = split(Batch(torch.ones(2, 2).long(), torch.ones(2, 2).bool(), targets), 2)[1]
    assert second.targets.tolist() == [[IGNORED]]
    assert second.num_targets == 0


def test_a_split_into_one_micro_batch_returns_the_batch() -> None:
    """The order of samples does not change either, as in the unsplit model."""
    batch = batch_of([((1,), (2, 3)), ((4, 5), (6,))])
    assert split(batch, 1) == [batch]
    assert split(batch, 1)[0] is batch


def test_equal_lengths_keep_their_order() -> None:
    """So each process splits a batch in the same way. 40 samples: torch's default sort is stable
    for few."""
    batch = batch_of([((number,), (number,)) for number in range(40)])
    first, second = (part.inputs.flatten().tolist() for part in split(batch, 2))
    assert first + second == list(range(40))


def _padded(rows: list[list[int]] | tuple[tuple[int, ...], ...], fill: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
