"""The Transformer equals torch's layers, and greedy decoding agrees with the loss."""

import math
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from thorough import chosen
from torch import Tensor, nn
from torch.nn import functional

from collapipe.errors import ConfigError
from collapipe.models.dropout import Dropout, DropoutKey, drawing_from
from collapipe.models.split import SplitModel
from collapipe.models.transformer import (
    Attention,
    Decoder,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    Sublayer,
    TransformerSpec,
    positions,
)
from collapipe.tensors import IGNORED, Batch
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import typed

VOCABULARY = Vocabulary(size=9, pad=0, bos=1, eos=2)
SPEC = TransformerSpec(2, 2, 16, 2, 24, dropout=0.0)
KEY = DropoutKey(1, 2, 3)
norms = pytest.mark.parametrize("norm", ["pre", "post"])
ties = pytest.mark.parametrize("tied", [True, False])


def model_of(spec: TransformerSpec, seed: int = 0) -> SplitModel:
    """A model in double precision; all weights, norms and biases are random and large enough to
    matter."""
    model = SplitModel(spec, VOCABULARY).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.05 if name.endswith("bias") else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model


def ragged() -> Batch:
    """Three sources and targets of different lengths."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randint(3, VOCABULARY.size, (3, 6), generator=generator)
    targets = torch.randint(2, VOCABULARY.size, (3, 5), generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
    real = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]
    return Batch(inputs, mask, targets.masked_fill(~real, IGNORED))


def decoder_of(model: SplitModel) -> Decoder:
    """The head as a ``Decoder``."""
    assert isinstance(model.head, Decoder)
    return model.head


@norms
def test_an_encoder_block_equals_that_of_torch(norm: str) -> None:
    """``nn.TransformerEncoderLayer`` with the same weights and mask gives the same output."""
    block = model_of(replace(SPEC, norm=norm)).blocks[0]
    hidden, mask = torch.randn(3, 6, 16, dtype=torch.float64), ragged().mask
    expected = _torchs_encoder_layer(block, norm)(hidden, src_key_padding_mask=~mask)
    torch.testing.assert_close(block(hidden, mask)[mask], expected[mask], rtol=0, atol=1e-12)


@norms
def test_a_decoder_block_equals_that_of_torch(norm: str) -> None:
    """``nn.TransformerDecoderLayer`` with the same weights, a causal mask and a mask of the
    memory."""
    block = decoder_of(model_of(replace(SPEC, norm=norm))).blocks[0]
    assert isinstance(block, DecoderBlock)
    x, memory = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    mask = ragged().mask[:, :5]
    expected = _torchs_decoder_layer(block, norm)(
        x, memory, tgt_mask=_causal(5), memory_key_padding_mask=~mask
    )
    keys_values = block.cross_attention.keys_values(memory)
    output, _ = block(x, keys_values, mask[:, None, None, :], None)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@norms
@ties
def test_the_loss_equals_that_of_torch_layers(norm: str, tied: bool) -> None:
    """Only pre-norm has a norm after both stacks; targets are shifted by BOS and include EOS."""
    model, batch = model_of(replace(SPEC, norm=norm, tie_embeddings=tied)), ragged()
    head = decoder_of(model)
    hidden = model.embedding(batch.inputs)
    for block in model.blocks:
        hidden = _torchs_encoder_layer(block, norm)(hidden, src_key_padding_mask=~batch.mask)
    memory = head.memory_norm(hidden) if norm == "pre" else hidden
    start = torch.full((3, 1), VOCABULARY.bos)
    x = head.embedding(torch.cat((start, batch.targets[:, :-1]), 1).clamp(min=0))
    for block in head.blocks:
        x = _torchs_decoder_layer(block, norm)(
            x, memory, tgt_mask=_causal(5), memory_key_padding_mask=~batch.mask
        )
    x = head.norm(x) if norm == "pre" else x
    output = head.output if head.output is not None else _Untied(head.embedding.tokens.weight)
    logits = output(x).flatten(0, 1)
    expected = functional.cross_entropy(
        logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(model.loss(batch, KEY), expected, rtol=0, atol=1e-11)
    norms = [head.memory_norm, head.norm]
    assert all(isinstance(module, nn.LayerNorm) == (norm == "pre") for module in norms)


def test_positions_equal_those_of_the_paper() -> None:
    """Section 3.5: columns alternate sin(pos / 10000^(2i/d)) and cos, from any first position."""
    expected = [
        [
            (math.cos if column % 2 else math.sin)(place / 1e4 ** ((column - column % 2) / 6))
            for column in range(6)
        ]
        for place in range(3, 8)
    ]
    table = positions(3, 5, 6, torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))
    assert positions(0, 2, 4, torch.empty(0)).dtype == torch.float32


def test_an_embedding_is_the_scaled_token_vector_plus_the_position() -> None:
    """The scale is √d."""
    embedding = model_of(SPEC).embedding
    ids = torch.tensor([[3, 4, 3]])
    vectors = embedding.tokens.weight[ids] * 4  # type: ignore[index,union-attr]
    places = positions(0, 3, 16, vectors)
    torch.testing.assert_close(embedding(ids), vectors + places, rtol=0, atol=1e-12)
    later = embedding(ids[:, 1:], 1)
    torch.testing.assert_close(embedding(ids)[:, 1:], later, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "tied"),
    chosen(product(("pre", "post"), (True, False)), [("pre", True), ("post", False)]),
)
def test_greedy_decoding_chooses_the_token_with_the_least_loss(norm: str, tied: bool) -> None:
    """The reference recomputes the whole prefix for each token, without cache, padding or batch."""
    spec, batch, longest = replace(SPEC, norm=norm, tie_embeddings=tied), ragged(), 7
    models = (model_of(spec, seed) for seed in range(20))
    found = ((model, model.generate(batch, longest)) for model in models)
    # most random models predict the same for all samples
    distinct = (each for each in found if len(set(map(tuple, each[1]))) == 3)
    for model, predictions in (next(distinct), next(distinct)):
        for inputs, mask, prediction in zip(batch.inputs, batch.mask, predictions, strict=True):
            assert prediction == _naive(model, inputs[None, mask], longest)


@norms
def test_decoding_a_batch_equals_decoding_each_sample(norm: str) -> None:
    """Some samples end early, others at the maximum length; padding and other samples change
    nothing."""
    batch, longest, mixed = ragged(), 8, 0
    for seed in range(20):
        model = model_of(replace(SPEC, norm=norm), seed)
        together = model.generate(batch, longest)
        for inputs, mask, prediction in zip(batch.inputs, batch.mask, together, strict=True):
            ids = inputs[None, mask]
            alone = Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids[:, :0])
            assert model.generate(alone, longest) == [prediction]
            assert VOCABULARY.eos not in prediction
        lengths = sorted(map(len, together))
        mixed += lengths[0] < lengths[-1] == longest
    assert mixed


def test_decoding_stops_when_the_last_sample_has_ended() -> None:
    """Each row equals the row decoded without an end token, up to its first end token."""
    batch, longest, early, steps = ragged(), 8, 0, Counter[str]()
    for seed in range(20):
        model = model_of(replace(SPEC, tie_embeddings=False), seed)
        head = decoder_of(model)
        head.blocks[0].register_forward_hook(lambda *_: steps.update(["step"]))
        head.vocabulary = replace(VOCABULARY, eos=-1)  # is never predicted
        rows = model.generate(batch, longest)
        assert [len(row) for row in rows] == [longest] * batch.num_samples
        for eos in set(chain(*rows)):
            head.vocabulary = replace(VOCABULARY, eos=eos)
            expected = [row[: row.index(eos)] if eos in row else row for row in rows]
            steps.clear()
            assert model.generate(batch, longest) == expected
            assert steps["step"] == min(longest, max(map(len, expected)) + 1)
            early += len(set(map(len, expected))) > 1 and steps["step"] < longest
    assert early


def test_decoding_stops_at_the_maximum_length() -> None:
    """A maximum of 0 gives empty rows."""
    model = model_of(SPEC)
    assert model.generate(ragged(), 0) == [[], [], []]
    assert max(map(len, model.generate(ragged(), 3))) <= 3


@norms
@ties
def test_padding_does_not_change_the_loss(norm: str, tied: bool) -> None:
    """The width and ids of the padding of inputs and targets do not change gradients either."""
    model, batch = model_of(replace(SPEC, norm=norm, tie_embeddings=tied)), ragged()
    inputs = torch.cat((batch.inputs.masked_fill(~batch.mask, 5), torch.full((3, 4), 8)), 1)
    mask = functional.pad(batch.mask, (0, 4), value=False)
    targets = functional.pad(batch.targets, (0, 3), value=IGNORED)
    results = []
    for each in (batch, Batch(inputs, mask, targets)):
        model.zero_grad()
        loss = model.loss(each, KEY)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([loss.detach(), *gradients])
    for left, right in zip(*results, strict=True):
        assert left is not None
        torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


@norms
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(norm: str) -> None:
    """Losses are summed and not averaged, so losses of micro-batches can be added."""
    model, batch = model_of(replace(SPEC, norm=norm)), ragged()
    losses = [
        model.loss(
            Batch(batch.inputs[row : row + 1], batch.mask[row : row + 1], targets[None]), KEY
        )
        for row, targets in enumerate(batch.targets)
    ]
    torch.testing.assert_close(sum(losses), model.loss(batch, KEY), rtol=0, atol=1e-11)


def test_samples_without_targets_have_no_loss() -> None:
    """A micro-batch of such samples has loss 0 and gradients of 0, not NaN."""
    model, batch = model_of(SPEC), ragged()
    loss = model.loss(Batch(batch.inputs, batch.mask, torch.full((3, 1), IGNORED)), KEY)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) > 0
    assert not any(gradient.any() for gradient in found)


def test_a_prediction_depends_only_on_earlier_targets() -> None:
    """Differences of prefix losses are log probabilities, which sum to 1 over the vocabulary."""
    model, batch = model_of(SPEC), ragged()
    row = Batch(batch.inputs[1:2], batch.mask[1:2], batch.targets[1:2])  # five targets
    assert row.num_targets == 5
    losses = [
        model.loss(Batch(row.inputs, row.mask, row.targets[:, :count]), KEY).item()
        for count in range(1, 6)
    ]
    steps = [after - before for before, after in zip([0.0, *losses], losses, strict=False)]
    hidden = model.encode(row.inputs, row.mask)
    for place in range(5):
        every = [
            row.targets[:, : place + 1].clone().index_fill(1, torch.tensor([place]), token)
            for token in range(VOCABULARY.size)
        ]
        before = losses[place - 1] if place else 0.0
        chances = [
            math.exp(before - decoder_of(model).loss(hidden, row.mask, targets).item())
            for targets in every
        ]
        assert sum(chances) == pytest.approx(1, abs=1e-10)
        assert chances[int(row.targets[0, place])] == pytest.approx(math.exp(-steps[place]))


def test_a_tied_output_layer_uses_the_weights_of_the_embedding() -> None:
    """A tied output has no weights; an untied output with the same weights has the same loss."""
    tied, free = model_of(SPEC), model_of(replace(SPEC, tie_embeddings=False))
    assert not any("output" in name for name, _ in tied.head.named_children())
    weights = tied.state_dict()
    assert set(free.state_dict()) - set(weights) == {"head.output.weight", "head.output.bias"}
    weights["head.output.weight"] = weights["head.embedding.tokens.weight"].clone()
    weights["head.output.bias"] = torch.zeros(VOCABULARY.size, dtype=torch.float64)
    free.load_state_dict(weights)
    batch = ragged()
    torch.testing.assert_close(free.loss(batch, KEY), tied.loss(batch, KEY), rtol=0, atol=1e-12)
    with torch.no_grad():
        free.state_dict()["head.output.bias"][3] += 1
    assert not torch.equal(free.loss(batch, KEY), tied.loss(batch, KEY))
    assert "embedding.tokens.weight" in weights  # the encoder's embedding is separate
    assert not torch.equal(
        weights["embedding.tokens.weight"], weights["head.embedding.tokens.weight"]
    )


def test_dropout_is_applied_to_every_sublayer_and_embedding() -> None:
    """Two per encoder block; one for each embedding; three per decoder block."""
    model, batch = model_of(replace(SPEC, dropout=0.4)).train(), ragged()
    with pytest.raises(RuntimeError, match="drawing_from"):
        model.encode(batch.inputs, batch.mask)
    drawn: list[str] = []
    for name, part in model.parts().items():
        for module in part.modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(
                    lambda _, inputs, output, name=name: drawn.extend(
                        [name] * (not torch.equal(inputs[0], output))
                    )
                )
    model.loss(batch, KEY)
    assert Counter(drawn) == {"embedding": 1, "blocks.0": 2, "blocks.1": 2, "head": 7}
    drawn.clear()
    assert torch.equal(model.eval().loss(batch, KEY), model_of(SPEC).loss(batch, KEY))
    assert drawn == []


def test_dropout_in_the_loss_depends_on_the_key() -> None:
    """The same key gives the same loss; another step gives another loss."""
    model, batch = model_of(replace(SPEC, dropout=0.4)).train(), ragged()
    assert torch.equal(model.loss(batch, KEY), model.loss(batch, KEY))
    assert not torch.equal(model.loss(batch, KEY), model.loss(batch, replace(KEY, step=4)))


@norms
def test_dropout_does_not_apply_to_the_residual(norm: str) -> None:
    """If the sublayer's output is dropped completely, x remains."""
    around = Sublayer(replace(SPEC, norm=norm, dropout=0.999999)).double()
    x, output = torch.randn(2, 3, 16, dtype=torch.float64).unbind(0)
    with drawing_from(torch.Generator().manual_seed(0)):
        after = around.after(x, output)
    assert torch.equal(after, x if norm == "pre" else around.norm(x))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 0),
        ("num_decoder_blocks", 0),
        ("dim", 0),
        ("dim", 15),
        ("dim", -16),
        ("num_heads", 0),
        ("num_heads", 3),
        ("feed_forward_dim", 0),
        ("dropout", -0.1),
        ("dropout", 1.0),
        ("dropout", math.nan),
        ("norm", "Pre"),
    ],
)
def test_invalid_sizes_and_options_are_refused(option: str, value: object) -> None:
    """The message names the option and its value, for command-line options and for Python
    arguments."""
    changed: dict[str, Any] = {**asdict(SPEC), option: value}
    with pytest.raises(ConfigError) as caught:
        typed("model", TransformerSpec, changed)
    assert f"model.{option}={value}" in str(caught.value)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(caught.value))}$"):
        TransformerSpec(**changed)


def test_an_odd_dimension_is_refused() -> None:
    """Sines and cosines come in pairs."""
    with pytest.raises(ConfigError, match=r"model\.dim=15: must be even and a multiple"):
        TransformerSpec(dim=15, num_heads=3)


def _naive(model: SplitModel, inputs: Tensor, longest: int) -> list[int]:
    """Greedy decoding with the loss only: the next token is the one that increases the loss
    least."""
    mask = torch.ones_like(inputs, dtype=torch.bool)
    hidden = model.encode(inputs, mask)
    prefix: list[int] = []
    for _ in range(longest):
        losses = [
            decoder_of(model).loss(hidden, mask, torch.tensor([[*prefix, token]])).item()
            for token in range(VOCABULARY.size)
        ]
        token = losses.index(min(losses))
        if token == VOCABULARY.eos:
            break
        prefix.append(token)
    return prefix


class _Untied(nn.Module):
    """Logits from an embedding's weights."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._weight.T


def _causal(length: int) -> Tensor:
    return torch.ones(length, length).triu(1).bool()  # torch's masks mark hidden positions


def _torchs_encoder_layer(block: nn.Module, norm: str) -> nn.Module:
    assert isinstance(block, EncoderBlock)
    layer = nn.TransformerEncoderLayer(
        16, 2, 24, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    _copy_attention(block.attention, layer.self_attn)
    _copy_feed_forward(block.feed_forward, layer)
    _copy_norms(layer, block.around_attention, block.feed_forward.around)
    return layer  # training mode avoids the fused path


def _torchs_decoder_layer(block: nn.Module, norm: str) -> nn.Module:
    assert isinstance(block, DecoderBlock)
    layer = nn.TransformerDecoderLayer(
        16, 2, 24, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    _copy_attention(block.self_attention, layer.self_attn)
    _copy_attention(block.cross_attention, layer.multihead_attn)
    _copy_feed_forward(block.feed_forward, layer)
    _copy_norms(layer, block.around_self, block.around_cross, block.feed_forward.around)
    return layer


def _copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    projections = (ours.query, ours.key, ours.value)
    _copy(theirs.in_proj_weight, torch.cat([layer.weight for layer in projections]))
    _copy(theirs.in_proj_bias, torch.cat([layer.bias for layer in projections]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def _copy_feed_forward(
    ours: FeedForward, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
) -> None:
    theirs.linear1.load_state_dict(ours.inner.state_dict())
    theirs.linear2.load_state_dict(ours.outer.state_dict())


def _copy_norms(theirs: nn.Module, *ours: Sublayer) -> None:
    for index, sublayer in enumerate(ours, start=1):
        theirs.get_submodule(f"norm{index}").load_state_dict(sublayer.norm.state_dict())


def _copy(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
