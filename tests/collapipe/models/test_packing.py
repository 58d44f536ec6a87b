"""Packed sequences have the same loss and gradients as sequences in separate rows."""

from pathlib import Path

import pytest
import torch
from huggingface import VOCABULARY

from collapipe.models.cut import CutSpec
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.layers import seeing
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import ModelSpec, SplitModel, packs
from collapipe.models.stem import StemSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.tensors import IGNORED, Batch
from pipeline.micro_batch import split
from tests.collapipe.models.test_decoders import by_default, tiny

ALONE = {  # families with other layers than attention, or with masks that ignore positions
    *("afmoe", "axk2", "bailing_hybrid", "deepseek_v32", "gpt_oss", "jamba", "kimi_linear"),
    *("lfm2_moe", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
SIZES = (6, 1, 7), (5,)  # of the sequences of two rows


def packed() -> tuple[Batch, list[Batch]]:
    """Two rows of sequences longer than a window, and each sequence alone."""
    draw = torch.Generator().manual_seed(1)
    alone = []
    for size in (each for row in SIZES for each in row):
        ids = torch.randint(3, VOCABULARY.size, (2, 1, size), generator=draw)
        targets = ids[1].masked_fill(torch.rand(1, size, generator=draw) < 0.3, IGNORED)
        targets[0, -1] = ids[1, 0, -1]
        alone.append(Batch(ids[0], torch.ones(1, size, dtype=torch.bool), targets))
    width = max(map(sum, SIZES))
    inputs, mask, targets = torch.zeros(3, 2, width, dtype=torch.int64).unbind()
    targets += IGNORED
    each = iter(alone)
    for row, sizes in enumerate(SIZES):
        start = 0
        for number, size in enumerate(sizes, 1):
            one, where = next(each), slice(start, start + size)
            inputs[row, where], targets[row, where] = one.inputs[0], one.targets[0]
            mask[row, where], start = number, start + size
    return Batch(inputs, mask.to(torch.uint8), targets), alone


def check(spec: ModelSpec) -> None:
    torch.manual_seed(0)
    model = SplitModel(spec, VOCABULARY).train()
    for weight in model.state_dict().values():
        weight.normal_(std=0.2)
    together, alone = packed()
    losses, gradients = [], []
    for batches in ([together], split(together, 2), alone):
        model.zero_grad()
        losses.append(sum(model.loss(each, DropoutKey(0, 0, 0)) for each in batches))
        losses[-1].backward()  # type: ignore[union-attr]
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    for loss, gradient in zip(losses[:2], gradients[:2], strict=True):
        torch.testing.assert_close(loss, losses[2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, gradients[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", by_default(("afmoe", "gemma2", "llama", "mixtral", "qwen3")))
def test_packed_rows_have_the_loss_and_gradients_of_separate_sequences(
    family: str, tmp_path: Path
) -> None:
    """Also with windowed attention, and with layers of the head."""
    spec = tiny(family, tmp_path)
    assert packs(spec) == (family not in ALONE)
    if packs(spec):
        check(spec)


def test_parts_of_derived_models_pack(tmp_path: Path) -> None:
    spec = tiny("qwen3", tmp_path, num_blocks=4)
    for derived in (CutSpec(spec, 2), StemSpec(spec, 1)):
        assert packs(derived)
        check(derived)


def test_our_transformer_and_gpt2_do_not_pack(tmp_path: Path) -> None:
    assert not packs(TransformerSpec())
    assert not packs(HuggingFaceSpec(family="gpt2"))


def test_positions_restart_with_each_sequence() -> None:
    mask = torch.tensor([[1, 1, 2, 3, 3, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    assert seeing(mask)["position_ids"].tolist() == [[0, 1, 0, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert seeing(mask.bool()).keys() == {"attention_mask"}


def test_rows_of_all_sequences_are_sent() -> None:
    together, _ = packed()
    read = RowsRead("real").of(together.mask, together.targets)
    assert torch.equal(read, together.mask.bool())
