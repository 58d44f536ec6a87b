"""Trains a small model on a device, to compare the results of two devices."""

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from huggingface import VOCABULARY
from sections import optimizer_settings
from split_parts import model_of, parts_of, segments_of

from collapipe.models.dropout import DropoutKey
from collapipe.models.split import Head, ModelSpec, SplitModel, build_empty
from collapipe.plan import ClusterPlan
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
        pipeline, head = cluster(spec, weights, state, device)
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
    """Return a pipeline of two segments with copies of ``weights``, and its head, all on
    ``device``."""
    model = model_of(spec, weights, VOCABULARY)
    embedding, blocks, head = parts_of(model, SETTINGS, state, device)
    plan = ClusterPlan(1, segments_of((1, len(blocks) - 1)), 2, "one_f_one_b")
    last = LocalHead(head)
    return inline_pipeline(plan, embedding, blocks, last), last


def check_close(found: Learned, expected: Learned, tolerance: float = 1e-5) -> None:
    """Check equality up to rounding, which can depend on a tensor's address. Results must be on
    the CPU."""
    assert found.numbers == pytest.approx(expected.numbers, rel=tolerance)
    assert found.answers == expected.answers
    for ours, theirs in ((found.weights, expected.weights), (found.state, expected.state)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
