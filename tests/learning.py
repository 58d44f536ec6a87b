"""Trains a small model on a device, to compare the results of two devices."""

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from huggingface import VOCABULARY
from sections import optimizer_settings

from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart, Part
from collapipe.models.split import HEAD, Head, ModelSpec, SplitModel, build_empty
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.tensors import Batch, Tensors
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline

# If a gradient is almost 0, AdamW divides rounding errors by eps.
SETTINGS = optimizer_settings(eps=1e-3)


@dataclass(frozen=True)
class Learned:
    """The results of two training steps, and the predictions of the trained model."""

    numbers: list[float]  # losses and norms
    weights: Tensors
    state: Tensors
    answers: list[list[int]]


def learned(spec: ModelSpec, batch: Batch, device: torch.device) -> Learned:
    """Train two steps; each starts from recorded weights and state, as on a control unit."""
    torch.manual_seed(3)
    weights, state = SplitModel(spec, VOCABULARY).state_dict(), Tensors()
    numbers = list[float]()
    for step in range(2):
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        pipeline, head = cluster(spec, copies, state, device)
        numbers += [pipeline.run(batch, DropoutKey(5, 1, step)), pipeline.step(0.01, 0.5)]
        weights = pipeline.weights() | head.weights()
        state = pipeline.optimizer_state() | head.optimizer_state()
    model = build_empty(lambda: SplitModel(spec, VOCABULARY), dict(weights)).to(device).eval()
    moved = batch.to(model.device)
    with torch.inference_mode():
        hidden = model.encode(moved.inputs, moved.mask)
        loss = cast(Head, model.head).loss(hidden, moved.mask, moved.targets)
    return Learned([*numbers, float(loss)], weights, state, model.generate(moved, 3))


def cluster(
    spec: ModelSpec, weights: Tensors, state: Tensors, device: torch.device
) -> tuple[Pipeline, LocalHead]:
    """Return a pipeline of two segments, and its head, all on ``device``."""
    modules = build_empty(lambda: SplitModel(spec, VOCABULARY), weights).parts()
    embedding, *blocks = (
        Part(name, module, SETTINGS, state, device)
        for name, module in modules.items()
        if name != HEAD
    )
    head = LocalHead(HeadPart(HEAD, modules[HEAD], SETTINGS, state, device))
    spans = [Span(0, 1), Span(1, len(blocks) - 1)]
    segments = tuple(SegmentPlan(f"device-{k}", span) for k, span in enumerate(spans))
    plan = ClusterPlan(1, segments, 2, "one_f_one_b")
    return inline_pipeline(plan, embedding, blocks, head), head


def check_close(found: Learned, expected: Learned, tolerance: float = 1e-5) -> None:
    """Check equality up to rounding, which can depend on a tensor's address. Results must be on
    the CPU."""
    assert found.numbers == pytest.approx(expected.numbers, rel=tolerance)
    assert found.answers == expected.answers
    for ours, theirs in ((found.weights, expected.weights), (found.state, expected.state)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
