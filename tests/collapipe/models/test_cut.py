"""A model that is cut twice equals the model that is cut once, with other weight names."""

import re
from pathlib import Path
from typing import cast

import pytest
import torch
from huggingface import VOCABULARY, InFloat64, batch_for, spec_of, without_dropout
from torch import Tensor, nn

from collapipe.errors import ConfigError
from collapipe.models.cost import measure_cost
from collapipe.models.cut import CutHead, CutSpec, cut_at, extra_rows
from collapipe.models.dropout import DropoutKey
from collapipe.models.lora import LoraSpec
from collapipe.models.split import ModelSpec, SplitModel, build_empty, frozen_names, table_rows
from collapipe.models.transformer import TransformerSpec

KEY = DropoutKey(seed=5, unit=1, step=7)
KINDS = ["own", "bert", "gpt2", "t5", "t5-wide", "own-lora", "t5-lora"]
HEADS = {"own": "decoder", "bert": "pooled", "gpt2": "causal", "t5": "decoder"}


def head_of(kind: str) -> str:
    return HEADS[kind.partition("-")[0]]


def spec_for(tmp_path: Path, kind: str) -> ModelSpec:
    """A small model without dropout; three or four of its layers are blocks."""
    if kind == "own":
        return TransformerSpec(4, 2, dim=16, num_heads=2, feed_forward_dim=24, dropout=0.0)
    if kind.endswith("-lora"):
        return LoraSpec(spec_for(tmp_path, kind.removesuffix("-lora")), rank=3)
    changes = without_dropout(kind.partition("-")[0])
    return cast(ModelSpec, spec_of(tmp_path, kind, head_of(kind), **changes))


def drawn(spec: ModelSpec) -> SplitModel:
    """A random model of one seed, drawn as a run draws its initial model."""
    torch.manual_seed(3)
    return SplitModel(spec, VOCABULARY)


def pair(spec: ModelSpec, cut: int) -> tuple[SplitModel, SplitModel]:
    """The model and the model cut twice, with the same random weights, which are not zero."""
    weights = {
        name: weight.double() + 0.2 * torch.randn_like(weight, dtype=torch.float64)
        for name, weight in drawn(spec).state_dict().items()
    }
    again = CutSpec(spec, cut)
    with torch.device("meta"):
        names = SplitModel(again, VOCABULARY).state_dict()
    pairs = zip(names, again.in_base(names), strict=True)
    own = {name: weights[old].clone() for name, old in pairs}
    models = (
        build_empty(lambda: SplitModel(spec, VOCABULARY), weights),
        build_empty(lambda: SplitModel(again, VOCABULARY), own),
    )
    whole, twice = (cast(SplitModel, model.to(torch.float64)) for model in models)
    return whole, twice


def gradients(model: SplitModel) -> dict[str, Tensor]:
    """The gradients of the trained weights."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cut", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradients_and_predictions_equal_those_of_the_uncut_model(
    tmp_path: Path, kind: str, cut: int
) -> None:
    spec = spec_for(tmp_path, kind)
    whole, twice = pair(spec, cut)
    batch = batch_for(head_of(kind))
    with InFloat64():
        losses = [model.train().loss(batch, KEY) for model in (whole, twice)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        predictions = [model.eval().generate(batch, 6) for model in (whole, twice)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0, abs=1e-12)
    expected, found = gradients(whole), CutSpec(spec, cut).in_base(gradients(twice))
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12, msg=name)
    assert predictions[0] == predictions[1] != [[]] * len(predictions[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_initial_weights_equal_those_of_the_uncut_model(tmp_path: Path, kind: str) -> None:
    spec = spec_for(tmp_path, kind)
    cut = CutSpec(spec, 1)
    twice = drawn(cut)
    expected, found = drawn(spec).state_dict(), cut.in_base(twice.state_dict())
    assert isinstance(twice.head, CutHead)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert len(twice.blocks) == 1


def test_a_cut_head_has_logits_only_if_the_original_head_has_them() -> None:
    """Without them predictions are scored by the loss."""
    head = nn.Module()
    assert not hasattr(CutHead({}, head), "logits")
    head.logits = lambda hidden, mask: hidden + mask
    assert CutHead({}, head).logits(torch.ones(1), torch.ones(1)) == 2


def test_encoder_blocks_in_the_head_keep_their_numbers(tmp_path: Path) -> None:
    """The decoder's own blocks have other names."""
    names = drawn(cut_at(spec_for(tmp_path, "own"), 2)).state_dict()
    stems = {found[0] for found in map(re.compile(r"[a-z.]*blocks\.\d").match, names) if found}
    encoder = {"blocks.0", "blocks.1", "head.blocks.2", "head.blocks.3"}
    assert stems == encoder | {"head.head.blocks.0", "head.head.blocks.1"}


def test_frozen_weights_stay_frozen_in_the_server_part(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "own-lora")
    cut = CutSpec(spec, 1)
    names = dict.fromkeys(frozen_names(cut, VOCABULARY), torch.empty(0))
    assert cut.in_base(names).keys() == frozen_names(spec, VOCABULARY) != set()


@pytest.mark.parametrize(
    ("kind", "rows"), [("own", 0), ("bert", 0), ("gpt2", 0), ("t5", 2), ("t5-wide", 4)]
)
@pytest.mark.parametrize("cut", [1, 3])
def test_extra_rows_are_counted_in_the_last_block_before_the_cut(
    tmp_path: Path, kind: str, rows: int, cut: int
) -> None:
    spec = spec_for(tmp_path, kind)
    if cut == spec.num_blocks:
        cut = 2
    again, batch = cut_at(spec, cut), batch_for(head_of(kind))
    hidden = drawn(again).eval().encode(batch.inputs, batch.mask)
    assert extra_rows(spec) == 0
    assert extra_rows(again) == hidden.shape[1] - batch.mask.shape[1] == rows
    assert table_rows(again) == rows  # known without a pass


def test_a_planner_sees_only_the_blocks_of_the_unit(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "bert")
    again = cut_at(spec, 1)
    assert (again.num_blocks, again.dim, again.head) == (1, spec.dim, spec.head)
    assert again.own_tokenizer == spec.own_tokenizer
    assert measure_cost(again, 7, 4) == measure_cost(spec, 7, 4)


@pytest.mark.parametrize("cut", [4, 9])
def test_a_cut_at_or_after_the_last_block_is_an_error(tmp_path: Path, cut: int) -> None:
    spec = spec_for(tmp_path, "own")
    assert cut_at(spec, None) is spec
    with pytest.raises(ConfigError, match=rf"framework\.cut={cut}: .*model\.num_blocks=4") as e:
        cut_at(spec, cut)
    assert "\n" not in str(e.value)
