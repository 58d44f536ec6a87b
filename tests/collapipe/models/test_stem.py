"""A model with a frozen stem equals the whole model; the stem computes each row independently."""

from pathlib import Path
from typing import cast

import pytest
import torch
from huggingface import VOCABULARY, InFloat64, batch_for, merged, spec_of, without_dropout
from sections import adapter_settings
from torch import Tensor

from collapipe.errors import ConfigError
from collapipe.models.cost import measure_cost, rows_of_input
from collapipe.models.cut import cut_at
from collapipe.models.dropout import DropoutKey
from collapipe.models.lora import LoraSpec, with_adapters
from collapipe.models.split import ModelSpec, SplitModel, build_empty, frozen_names
from collapipe.models.stem import Stem, StemSpec
from collapipe.models.transformer import TransformerSpec

KEY = DropoutKey(seed=5, unit=1, step=7)
HEADS = {"own": "decoder", "bert": "pooled", "gpt2": "causal", "t5": "decoder", "llama": "causal"}
DROPPING = TransformerSpec(3, 1, dim=32, num_heads=2, feed_forward_dim=48, dropout=0.4)
LONGEST = 7  # tokens of the batches


def base_of(tmp_path: Path, kind: str) -> ModelSpec:
    """A small model without dropout; three or four of its layers are blocks."""
    if kind == "own":
        return TransformerSpec(4, 2, dim=16, num_heads=2, feed_forward_dim=24, dropout=0.0)
    family = kind.partition("-")[0]
    return cast(ModelSpec, spec_of(tmp_path, kind, HEADS[family], **without_dropout(family)))


def adapted(base: ModelSpec, last_blocks: int) -> StemSpec:
    settings = adapter_settings(rank=3, alpha=7.0, last_blocks=last_blocks)
    spec = with_adapters(base, settings)
    assert isinstance(spec, StemSpec)
    return spec


def drawn(spec: ModelSpec) -> SplitModel:
    """A random model of one seed, drawn as a run draws its initial model."""
    torch.manual_seed(3)
    return SplitModel(spec, VOCABULARY)


def pair(spec: StemSpec) -> tuple[SplitModel, SplitModel]:
    """The models without and with a stem, with the same random weights, which are not zero."""
    weights = {
        name: weight.double() + 0.2 * torch.randn_like(weight, dtype=torch.float64)
        for name, weight in drawn(spec).state_dict().items()
    }
    whole = {k: w.clone() for k, w in spec.in_base(weights).items()}
    models = (
        build_empty(lambda: SplitModel(spec.base, VOCABULARY), whole),
        build_empty(lambda: SplitModel(spec, VOCABULARY), weights),
    )
    first, second = (cast(SplitModel, model.to(torch.float64)) for model in models)
    return first, second


def gradients(model: SplitModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("last_blocks", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("kind", ["own", "bert", "gpt2", "llama", "t5", "t5-wide"])
def test_loss_and_gradients_equal_those_of_the_model_without_a_stem(
    tmp_path: Path, kind: str, last_blocks: int
) -> None:
    spec = adapted(base_of(tmp_path, kind), last_blocks)
    batch = batch_for(HEADS[kind.partition("-")[0]])
    with InFloat64():
        whole, stemmed = pair(spec)
        losses = [model.loss(batch, KEY) for model in (whole, stemmed)]
        torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-8)
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
    expected, found = gradients(whole), spec.in_base(gradients(stemmed))
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize("kind", ["own", "bert", "t5"])
def test_the_initial_weights_equal_those_of_the_base_model(tmp_path: Path, kind: str) -> None:
    """With the same seed and merged adapters. Only the last blocks have adapters; the embedding is
    frozen."""
    base = base_of(tmp_path, kind)
    spec = adapted(base, 2)
    found = spec.in_base(drawn(spec).state_dict())
    plain, expected = merged(cast(LoraSpec, spec.base), found), drawn(base).state_dict()
    assert plain.keys() == expected.keys()
    assert all(torch.equal(plain[name], weight) for name, weight in expected.items())
    adapters = {
        name.split(".")[1] for name in found if name.startswith("blocks.") and "lora_" in name
    }
    assert adapters == {str(base.num_blocks - 2), str(base.num_blocks - 1)}
    frozen = frozen_names(spec, VOCABULARY)
    assert {name for name in drawn(spec).state_dict() if name.startswith("embedding.")} <= frozen


@pytest.mark.parametrize("kind", ["own", "bert", "gpt2", "llama", "t5"])
def test_the_bits_of_a_row_depend_only_on_the_row(tmp_path: Path, kind: str) -> None:
    """Other rows, the row's place and padding do not change them; the output at padding is 0."""
    stem = drawn(adapted(base_of(tmp_path, kind), 2)).embedding
    assert isinstance(stem, Stem)
    batch = batch_for(HEADS[kind])
    together = stem(batch.inputs, batch.mask)
    further = together.shape[1] - LONGEST
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        for width in (length, LONGEST):
            for others in ([row], [row, 0], [1, row]):
                alone = stem(batch.inputs[others, :width], batch.mask[others, :width])
                place = others.index(row)
                assert torch.equal(alone[place, :length], together[row, :length])
                assert torch.equal(alone[place, width:], together[row, LONGEST:])
                assert alone.shape[1] == width + further
        assert not together[row, length:LONGEST].any()


def test_a_stem_has_no_dropout_and_no_gradient() -> None:
    """The blocks after the stem have dropout and gradients."""
    spec, batch = adapted(DROPPING, 1), batch_for("decoder")
    model = drawn(spec).train()
    assert torch.equal(
        model.embedding(batch.inputs, batch.mask), model.embedding(batch.inputs, batch.mask)
    )
    assert not model.embedding(batch.inputs, batch.mask).requires_grad
    assert not any(module.training for module in model.embedding.modules())
    assert model.loss(batch, KEY) != model.loss(batch, DropoutKey(6, 1, 7))


@pytest.mark.parametrize("kind", ["own", "t5", "t5-wide"])
def test_the_planner_counts_blocks_after_the_stem(tmp_path: Path, kind: str) -> None:
    """A block costs as much as in the whole model, including T5's table of position biases."""
    base = base_of(tmp_path, kind)
    spec = adapted(base, 3)
    assert spec.num_blocks == 3
    cost, whole = measure_cost(spec, LONGEST, 4), measure_cost(spec.base, LONGEST, 4)
    assert cost.forward_flops == whole.forward_flops
    assert cost.activation_bits == whole.activation_bits


@pytest.mark.parametrize("frozen_blocks", [0, 2])
@pytest.mark.parametrize("kind", ["own", "t5", "t5-wide"])
def test_the_planner_counts_the_rows_that_a_stem_appends(
    tmp_path: Path, kind: str, frozen_blocks: int
) -> None:
    base, batch = base_of(tmp_path, kind), batch_for("decoder")
    spec = adapted(base, base.num_blocks - frozen_blocks)
    hidden = drawn(spec).embedding(batch.inputs, batch.mask)
    assert rows_of_input(spec, LONGEST) == hidden.shape[1]


@pytest.mark.parametrize("last_blocks", [5, 6])
def test_more_last_blocks_than_the_model_has_are_refused(tmp_path: Path, last_blocks: int) -> None:
    with pytest.raises(ConfigError, match=rf"adapter\.last_blocks={last_blocks}: .* 4") as caught:
        adapted(base_of(tmp_path, "own"), last_blocks)
    assert "\n" not in str(caught.value)


def test_options_that_contradict_a_stem_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.cache=true: .* adapter\.last_blocks"):
        adapter_settings(cache=True)
    with pytest.raises(ConfigError, match=r"framework\.cut=1: .* adapter\.last_blocks=2"):
        cut_at(adapted(base_of(tmp_path, "own"), 2), 1)
