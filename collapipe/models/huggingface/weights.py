"""Read a pretrained model's weights from its safetensors files, without running its code.

``mapped`` reads the tensors of one part, which take memory only when they are used; ``made``
converts them as transformers does. ``converted`` reads the whole model through transformers.
"""

import copy
import functools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar
from transformers.utils.peft_utils import find_adapter_config_file

from collapipe.errors import ConfigError, one_line
from collapipe.hub import hub_silence
from collapipe.tensors import Tensors, aligned
from collapipe.wire.frozen_store import state_of

T = TypeVar("T")
# Hide transformers' coloured table of missing weights: whoever calls ``converted`` reports them.
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in str(record.msg)
)


class Stored(NamedTuple):
    """Files of a model's weights, and their state when they were found."""

    files: tuple[Path, ...]
    state: Hashable


Places = Mapping[str, tuple[Path, str]]
"""Tensor of the model → its file, and its name there."""
Sources = tuple[Any, list[tuple[Any, str]]]
"""How transformers makes a weight: a converter, and tensors in files with the converter's patterns;
no converter if a tensor is only renamed."""
UNREADABLE = (
    *(ImportError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError),
)
_WRAPPERS = "_orig_mod.", "module."  # name prefixes that torch.compile and DataParallel add


def checked(name: str, config: Any) -> Stored:
    """Return ``stored`` of a hub id or a folder; the hub is asked for missing files.

    Raises ``ConfigError`` unless they are a model's own weights in safetensors files.
    """
    if getattr(config, "quantization_config", None) is not None:  # other libraries would read it
        raise ConfigError(
            f"model.name={name}: holds quantised weights, which cannot be trained; name the "
            "model that they were made of"
        )
    local = bool(hub_silence(name))
    if find_adapter_config_file(name, local_files_only=local):  # transformers would load its base
        raise ConfigError(
            f"model.name={name}: holds an adapter; merge it into its model with peft, save "
            "that, and name its folder"
        )
    with reading(name):
        return stored(name, local)


def stored(name: str, local: bool) -> Stored:
    """Return the files of a model's weights. With ``local`` only a folder or the hub's cache is
    read.

    transformers' own reader could be led to pickles by an index or a field of ``config.json``.
    Raises one of ``UNREADABLE``.
    """
    fetch = functools.partial(cached_file, name, local_files_only=local)
    files = [fetch("model.safetensors", _raise_exceptions_for_missing_entries=False)]
    if files == [None]:
        index = json.loads(Path(fetch("model.safetensors.index.json")).read_text("utf-8"))
        files = []
        for shard in sorted(set(map(str, dict(index["weight_map"]).values()))):
            if re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard) is None:
                raise ValueError(f"its index names {shard[:80]!r}")
            files.append(fetch(shard))
    paths = tuple(map(Path, files))
    return Stored(paths, state_of(*paths))


def places(files: Iterable[Path]) -> Places:
    """Return where the tensors of ``files`` lie. Raises one of ``UNREADABLE``."""
    found = dict[str, tuple[Path, str]]()
    for file in files:
        with safe_open(file, "pt") as opened:  # also checks the length of the file
            found |= {tensor: (file, tensor) for tensor in opened.keys()}  # noqa: SIM118
    return _unwrapped(found)


def mapped(found: Places, like: Mapping[str, Tensor]) -> Tensors | None:
    """Return tensors with the names, shapes and dtypes of ``like``; None unless all are there.

    A tensor of another floating-point dtype in the file is converted, the others are mapped.
    Raises one of ``UNREADABLE``.
    """
    return _fitting(_read(found, like), like) if like.keys() <= found.keys() else None


def sources(names: Iterable[str], model: Any) -> dict[str, Sources]:
    """Return of which tensors ``names`` in its files transformers makes each weight of ``model``.

    Of several weights that are made together the first one is named.
    """
    changes = get_model_conversion_mapping(model)
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    renamings = [each for each in changes if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own, found = model.state_dict(), dict[str, Sources]()
    how = renamings, converters, model.base_model_prefix, own
    for tensor in sorted(names, key=dot_natural_key):  # experts by their numbers
        weight, pattern = rename_source_key(tensor, *how)
        if weight not in own:
            weight, pattern = tensor, None
        found.setdefault(weight, (by_pattern.get(pattern), []))[1].append((pattern, tensor))
    return found


def made(
    found: Places, of: Mapping[str, Sources], like: Mapping[str, Tensor], model: Any
) -> Tensors | None:
    """Return tensors as ``mapped`` does, which transformers renames, splits or fuses; see
    ``sources``."""
    own = _read(found, [tensor for _, each in of.values() for _, tensor in each])
    tensors: Tensors = {}
    for weight, (converter, each) in of.items():
        values = {weight: own[each[-1][1]]}
        if converter is not None:
            collecting = copy.deepcopy(converter)
            for pattern, tensor in each:
                collecting.add_tensor(weight, tensor, pattern, own[tensor])
            values = collecting.convert(weight, model=model, config=model.config)
        tensors |= {n: v[0] if isinstance(v, list) else v for n, v in values.items()}
    fitting = _fitting(tensors, like) or {}
    return {name: aligned(each) for name, each in fitting.items()} or None


def _read(found: Places, names: Iterable[str]) -> Tensors:
    tensors, by_file = Tensors(), defaultdict[Path, list[str]](list)
    for name in names:
        by_file[found[name][0]].append(name)
    for file, its in by_file.items():
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(found[name][1]) for name in its}
    return tensors


def _fitting(tensors: Tensors, like: Mapping[str, Tensor]) -> Tensors | None:
    if not like.keys() <= tensors.keys():
        return None
    for name, each in like.items():
        _check_kind(name, each, tensors[name])
    fits = all(
        (tensors[n].shape, tensors[n].is_floating_point()) == (each.shape, each.is_floating_point())
        for n, each in like.items()
    )
    return {n: tensors[n].to(like[n].dtype).contiguous() for n in like} if fits else None


def _check_kind(name: str, like: Tensor, own: Tensor) -> None:
    """Raise ``ValueError`` for integers in place of a floating-point weight."""
    if like.is_floating_point() and not own.is_floating_point():
        raise ValueError(f"{name} is {own.dtype}: quantised weights cannot be trained")


def converted(
    name: str, files: Iterable[Path], kind: Any, config: Any
) -> tuple[Tensors, set[str], set[str]]:
    """Return the weights of a model of transformers' class ``kind`` in float32, by its names, the
    names of missing ones and of those with another shape; both kinds are drawn.

    Raises ``ConfigError`` if a file cannot be read.
    """
    config.transformers_weights = None  # a field of config.json that may name a pickle
    disable_progress_bar()
    with reading(name):
        tensors: Tensors = {}
        for file in files:
            tensors |= load_file(file)
        model, loading_info = kind.from_pretrained(
            None,
            config=config,
            state_dict=(tensors := _unwrapped(tensors)),
            attn_implementation="eager",  # config.json may name kernels of the hub
            experts_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        for name, own in model.state_dict().items():
            _check_kind(name, own, tensors.get(name, own))
    misfits = {misfit for misfit, *_ in loading_info["mismatched_keys"]}
    return dict(model.state_dict()), set(loading_info["missing_keys"]), misfits


def _unwrapped(found: dict[str, T]) -> dict[str, T]:
    """Remove the name prefixes that torch.compile and DataParallel add."""
    for prefix in _WRAPPERS * 2:  # in either order
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): each for name, each in found.items()}
    return found


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Convert errors of reading into ``ConfigError``."""
    try:
        yield
    except UNREADABLE as error:
        raise ConfigError(
            f"model.name={name}: cannot read weights from safetensors ({one_line(error)}); "
            "write them with transformers' save_pretrained, or set model.pretrained=false for "
            "fresh ones"
        ) from error
