"""Split and micro-batched models of transformers compute what the unchanged models compute."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from huggingface import (
    ONE_OF_EACH,
    VARIANTS,
    VOCABULARY,
    InFloat64,
    batch_for,
    own_loss,
    spec_of,
    untouched,
    without_dropout,
)
from sections import optimizer_settings
from split_parts import model_of, parts_of, segments_of
from torch import Tensor

from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.plan import ClusterPlan, Share
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline

KEY = DropoutKey(seed=5, unit=1, step=7)


def split_model(spec: HuggingFaceSpec) -> SplitModel:
    """Random weights that are not zero: zero biases would hide a mistake."""
    torch.manual_seed(3)
    model = SplitModel(cast(ModelSpec, spec), VOCABULARY).to(torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model.train()


def pipeline_of(
    spec: HuggingFaceSpec,
    weights: dict[str, Tensor],
    cut: Sequence[int],
    micro_batches: int,
    shared: bool = False,
) -> tuple[Pipeline, SplitModel]:
    """A cluster with copies of ``weights``. With ``shared`` two devices compute each segment."""
    model = model_of(cast(ModelSpec, spec), weights, VOCABULARY)
    embedding, blocks, head = parts_of(model, optimizer_settings())
    segments = segments_of(cut)
    if shared:
        segments = tuple(
            replace(each, shares=(Share(each.device, 1), Share(f"other-{k}", 2)))
            for k, each in enumerate(segments)
        )
    plan = ClusterPlan(KEY.unit, segments, micro_batches, "one_f_one_b")
    return inline_pipeline(plan, embedding, blocks, LocalHead(head)), model


def cut_of(spec: HuggingFaceSpec) -> tuple[int, ...]:
    """Three segments, or two of a causal model."""
    return (1, 2, 1) if spec.num_blocks == 4 else (1, 2)


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_loss_and_gradients_equal_those_of_the_unchanged_model(
    tmp_path: Path, name: str, head: str
) -> None:
    """If the split model has two copies of a weight, the sum of their gradients is compared."""
    spec = spec_of(tmp_path, name, head, **without_dropout(VARIANTS[name][0]))
    model, batch = split_model(spec), batch_for(head)
    twins = spec.untied()  # embedding → its copy after the blocks
    with torch.no_grad():
        for ours, twin in twins.items():
            model.get_parameter(ours).copy_(model.get_parameter(twin))
    whole, places = untouched(spec, model)
    with InFloat64():
        pipeline, split = pipeline_of(spec, model.state_dict(), cut_of(spec), 3)
        loss = pipeline.run(batch, KEY)
        expected = own_loss(head, whole.train(), batch)
        expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), rel=0, abs=1e-8)
    found = {ours: parameter.grad for ours, parameter in split.named_parameters()}
    for ours, twin in twins.items():
        assert found[ours] is not None
        found[ours] = found[twin] = found[ours] + found[twin]  # type: ignore[operator]
    theirs = {id(weight): weight.grad for weight in whole.parameters() if weight.grad is not None}
    for ours, gradient in found.items():
        weight = whole.get_parameter(places[ours])
        assert gradient is not None, ours
        torch.testing.assert_close(gradient, weight.grad, rtol=0, atol=1e-8, msg=ours)
        theirs.pop(id(weight), None)
    assert not theirs  # every weight that transformers trains is trained here


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_segments_shared_by_two_devices_have_the_same_loss_and_gradients(
    tmp_path: Path, name: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices share the rows of each segment. Dropout is off, because each share draws its own
    masks."""
    monkeypatch.setattr("collapipe.models.dropout.dropout", lambda x, probability: x)
    spec, results = spec_of(tmp_path, name, head), []
    weights = {key: value.double() for key, value in split_model(spec).state_dict().items()}
    for shared in (False, True):
        pipeline, split = pipeline_of(spec, weights, cut_of(spec), 1, shared)
        results.append((pipeline.run(batch_for(head), KEY), split))
    (loss, alone), (other_loss, together) = results
    assert other_loss == pytest.approx(loss, rel=0, abs=1e-12)
    for own, other in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_dropout_depends_on_the_key_and_not_on_the_cut(
    tmp_path: Path, name: str, head: str
) -> None:
    """The same key gives the same bits for each cut and each state of torch's generator."""
    spec = spec_of(tmp_path, name, head)
    weights, batch = split_model(spec).state_dict(), batch_for(head)
    losses, results = [], []
    for number, cut in enumerate([cut_of(spec), (sum(cut_of(spec)),)]):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        pipeline, split = pipeline_of(spec, weights, cut, 3)
        losses.append(pipeline.run(batch, KEY))
        results.append([parameter.grad for parameter in split.parameters()])
        assert torch.equal(before, torch.get_rng_state())
    assert losses[0] == losses[1]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*results, strict=True))
    other = pipeline.run(batch, DropoutKey(KEY.seed, KEY.unit, KEY.step + 1))
    pipeline, split = pipeline_of(spec, weights, cut, 3)
    split.eval()
    assert len({losses[0], other, pipeline.run(batch, KEY)}) == 3
