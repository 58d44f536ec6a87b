"""Rows that the head does not read need not be sent: loss, gradients and weights keep their
bits."""

from pathlib import Path

import pytest
import torch
from huggingface import CASES, ONE_OF_EACH, VOCABULARY, batch_for, spec_of
from sections import optimizer_settings
from torch import Tensor

from collapipe.models.cut import cut_at
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.models.split import HEAD, ModelSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.tensors import IGNORED, Batch

OWN = TransformerSpec(4, 2, dim=16, num_heads=2, feed_forward_dim=24, dropout=0.1)


def stepped(spec: ModelSpec, batch: Batch, hidden: Tensor) -> tuple[float, Tensor, list[Tensor]]:
    """Loss and gradient of a step with dropout, and the weights after the step."""
    torch.manual_seed(3)
    part = HeadPart(HEAD, spec.build_head(VOCABULARY), optimizer_settings())
    generator = DropoutKey(0, 0, 0).generator(HEAD, 0)
    loss, gradient = part.answer(hidden, batch.mask, batch.targets, batch.num_targets, generator)
    part.step(0.1, 1.0)
    return loss, gradient, list(part.weights().values())


def check(spec: ModelSpec) -> RowsRead:
    rows, batch = RowsRead.by(spec), batch_for(str(spec.head))
    read = rows.of(batch.mask, batch.targets)
    hidden = torch.randn(*read.shape, spec.dim, generator=torch.Generator().manual_seed(5))
    loss, gradient, weights = stepped(spec, batch, hidden)
    assert not gradient[~read].any()
    again = stepped(spec, batch, scattered(hidden[read], read))
    assert again[0] == loss
    assert torch.equal(again[1], gradient)
    assert all(map(torch.equal, again[2], weights))
    assert 0 < int(read.sum()) < read.numel()
    return rows


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_heads_of_all_families_need_only_the_rows_that_they_read(
    tmp_path: Path, name: str, head: str
) -> None:
    reads = {"pooled": "first", "tokens": "labelled"}.get(head, "real")
    assert check(spec_of(tmp_path, name, head)).reads == reads


def test_our_decoder_needs_only_real_rows() -> None:
    assert check(OWN) == RowsRead("real")


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_blocks_after_a_cut_need_all_real_rows(tmp_path: Path, name: str) -> None:
    """These blocks attend to all real tokens, even if the head reads fewer rows."""
    head = dict(CASES)[name]
    assert check(cut_at(spec_of(tmp_path, name, head), 1)).reads == "real"


def test_all_rows_are_sent_to_a_head_of_unknown_kind() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert RowsRead("every", 2).of(mask, torch.zeros(2, 1)).all()


def test_numbers_of_sent_rows_equal_those_counted_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    targets = torch.tensor([[IGNORED, 4], [3, 2]])
    count = {
        reads: int(RowsRead(reads).of(mask, targets).sum())
        for reads in ("first", "labelled", "real", "every")
    }
    assert count == {"first": 2, "labelled": 3, "real": 5, "every": 6}
