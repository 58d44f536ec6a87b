"""A run's frozen weights, its base: named by digests, and kept in its folder only if drawn there.

::

    model/base.json                part → SHA-256 of its frozen weights
    model/base/SHA256.safetensors  parts that the pretrained model's own files do not have
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from collapipe.config import Settings
from collapipe.config.trust import read_limited
from collapipe.models.frozen import FrozenParts, find, forget, frozen_in, published
from collapipe.models.kept import quantised_without_values, to_dtype
from collapipe.models.part import prefixed
from collapipe.models.split import SplitModel, builders, frozen_names, training_names
from collapipe.models.without_values import WithoutValues
from collapipe.runs.folder import BASE, check_there
from collapipe.sections import LoraSettings
from collapipe.tensors import Tensors
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import from_json
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest

_DIGESTS = TypeAdapter(dict[str, str])
_COMPLETE = "causal", "decoder"  # heads of which a pretrained model draws no weight


def base_of(run_dir: Path, settings: Settings, vocabulary: Vocabulary) -> FrozenParts:
    """Return the frozen weights of the run in ``run_dir``: those that its folder names, empty if
    nothing is frozen. Raises ``ConfigError`` if the file of digests is missing or invalid.
    """
    file = run_dir / f"{BASE}.json"
    check_there(run_dir, file)
    what = "the digests of frozen weights"
    digests = from_json(_DIGESTS, file, read_limited(file), what, "; restore it")
    return _base(run_dir, settings, vocabulary, digests)


def _base(
    run_dir: Path, settings: Settings, vocabulary: Vocabulary, digests: dict[str, str]
) -> FrozenParts:
    stores = FrozenStore(run_dir / BASE, is_cache=False), FrozenStore(default_folder())
    dtype = getattr(torch, settings.pipeline.dtype)
    return FrozenParts(digests, settings.model, vocabulary, dtype, stores)


def begin(run_dir: Path, settings: Settings, vocabulary: Vocabulary) -> tuple[Tensors, FrozenParts]:
    """Return the trainable weights of the untrained model, a function of the seed, and its frozen
    ones. Frozen weights that are drawn are written to the folder.

    One part at a time is in memory. Raises ``ConfigError`` if it cannot be read or written.
    """
    digests, trained, spec = dict[str, str](), Tensors(), settings.model
    base, building = _base(run_dir, settings, vocabulary, {}), builders(spec, vocabulary)
    with WithoutValues():
        empty = {name: build() for name, build in building.items()}
    complete = spec.own_tokenizer is not None and spec.head in _COMPLETE
    freezes = any(not each.requires_grad for part in empty.values() for each in part.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        for name, build in building.items():
            like = frozen_in(empty[name], base.dtype) if freezes else {}
            there = None
            if like and complete:
                there = published(spec, name, empty[name], base.dtype, store=base.stores[-1])
            if there is None or training_names(empty[name]):
                with nullcontext() if there is None else quantised_without_values():
                    state = to_dtype(build(), base.dtype).state_dict()
                own = {key: each.clone() for key, each in state.items() if key not in like}
                trained |= prefixed(name, own)
            if there is not None:
                digests[name] = there[0]
            elif like:
                digests[name] = _kept(base, name, empty[name], {key: state[key] for key in like})
    forget(spec)
    take_adapters(settings, trained)
    return trained, replace(base, digests=digests)


def take_adapters(settings: Settings, weights: Tensors) -> None:
    """Copy the adapters with which the run begins, if it has such, into ``weights``."""
    if isinstance(settings.adapter, LoraSettings) and settings.adapter.path:
        from collapipe.models.adapter_folder import begin_with  # imports transformers

        begin_with(Path(settings.adapter.path), settings.model, weights)


def _kept(base: FrozenParts, part: str, empty: nn.Module, frozen: Tensors) -> str:
    """Return the digest of frozen weights, and write them to the run's folder if they are not in
    the model's files."""
    name, own = digest(frozen), base.stores[:1]
    if find(name, base.spec, part, empty, base.dtype, own) is None:
        own[0].add(frozen)
    return name


def trained_form(settings: Settings, vocabulary: Vocabulary) -> Tensors:
    """Return tensors without values like the run's trainable weights."""
    with WithoutValues():
        model = SplitModel(settings.model, vocabulary)
    state = model.to(getattr(torch, settings.pipeline.dtype)).state_dict()
    frozen = frozen_names(settings.model, vocabulary)
    return {name: each for name, each in state.items() if name not in frozen}
