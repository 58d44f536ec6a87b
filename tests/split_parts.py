"""A split model's parts, with optimisers, and the segments of the devices that hold its blocks."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from collapipe.models.part import HeadPart, Part
from collapipe.models.split import HEAD, ModelSpec, SplitModel, build_empty
from collapipe.plan import SegmentPlan, Span
from collapipe.process.torch_device import CPU
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors
from collapipe.text.vocabulary import Vocabulary


def model_of(spec: ModelSpec, weights: Mapping[str, Tensor], vocabulary: Vocabulary) -> SplitModel:
    """Return a model with copies of ``weights``, built as a control unit builds it."""
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    model = build_empty(lambda: SplitModel(spec, vocabulary), copies)
    assert isinstance(model, SplitModel)
    return model


def parts_of(
    model: SplitModel,
    settings: OptimizerSettings,
    state: Tensors | None = None,
    device: torch.device = CPU,
) -> tuple[Part, list[Part], HeadPart]:
    """Return the model's embedding, blocks and head, which train with optimiser ``state``."""
    modules = model.parts()
    head = HeadPart(HEAD, modules.pop(HEAD), settings, state, device)
    embedding, *blocks = (Part(*each, settings, state, device) for each in modules.items())
    return embedding, blocks, head


def segments_of(cut: Sequence[int], names: Sequence[str] = ()) -> tuple[SegmentPlan, ...]:
    """Return segments of ``cut[k]`` consecutive blocks on the k-th device."""
    names = names or [f"device-{k}" for k in range(len(cut))]
    spans = map(Span, accumulate(cut[:-1], initial=0), cut)
    return tuple(map(SegmentPlan, names, spans))
