"""Assemble the whole model of transformers from a run's weights, to export it or to generate."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from collapipe.models.cut import without_cut
from collapipe.models.huggingface.skeleton import fill, skeleton
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LORA, LoraSpec, kept_as
from collapipe.models.split import ModelSpec, SplitModel, build_empty, original
from collapipe.models.weights.kept import widen
from collapipe.models.weights.without_values import WithoutValues
from collapipe.tensors import aligned
from collapipe.text.vocabulary import Vocabulary


def is_of_transformers(spec: ModelSpec) -> bool:
    """Whether ``spec`` is, or derives from, a model of transformers."""
    return isinstance(original(spec), HuggingFaceSpec)


def assembled(spec: ModelSpec, vocabulary: Vocabulary, weights: Mapping[str, Tensor]) -> Any:
    """Return the original model in evaluation mode, which holds ``weights`` themselves, or wide
    copies of narrow ones.

    These are the split model's. Adapters are in place, not merged. If there are two copies of a
    weight that the original shares and they differ, its configuration unties them. Raises
    ``RuntimeError`` if the weights are not this model's.
    """
    spec, weights = without_cut(spec, weights)
    lora = spec if isinstance(spec, LoraSpec) else None
    base = lora.base if lora else spec
    assert isinstance(base, HuggingFaceSpec)
    if lora and kept_as(lora) is not None:
        own = {name: weight.detach() for name, weight in weights.items()}
        model = build_empty(lambda: SplitModel(spec, vocabulary), own)
        weights = widen(model).state_dict()
    config = base.run_config(vocabulary)
    twins = base.untied()
    if any(not torch.equal(weights[one], weights[other]) for one, other in twins.items()):
        config.tie_word_embeddings = False
    else:
        weights = {**weights, **{other: weights[one] for one, other in twins.items()}}
    values = {base.names.to_original(ours): aligned(each) for ours, each in weights.items()}
    values |= {twin: values[name].clone() for twin, name in base.copies(vocabulary).items()}
    whole = skeleton(config, base.class_name)
    with WithoutValues():
        fill(whole, whole, draw=False)
        if lora:
            _add_adapters(lora, whole, {name.partition(LORA)[0] for name in values if LORA in name})
    missing, unexpected = whole.load_state_dict(values, strict=False, assign=True)
    constants = set(getattr(whole, "_keys_to_ignore_on_save", None) or ())
    if unmatched := [*sorted(set(missing) - constants), *unexpected]:
        raise RuntimeError(f"{unmatched[0]} is missing or unknown")
    return whole.eval()


def _add_adapters(spec: LoraSpec, model: nn.Module, names: set[str]) -> None:
    from peft import inject_adapter_in_model

    layers = {name: model.get_submodule(name) for name in names}
    only = "|".join(map(re.escape, layers))  # peft compares a list of many names slowly
    inject_adapter_in_model(spec.peft_config(layers, target_modules=only), model)
