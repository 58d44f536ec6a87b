"""A folder of peft: adapters to begin a run with, or those that a run has trained.

Only ``adapter_config.json`` and ``adapter_model.safetensors`` are read, so nothing is unpickled.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from collapipe.errors import ConfigError, few_of, one_line
from collapipe.models.cut import without_cut
from collapipe.models.huggingface.families import CLASSES
from collapipe.models.huggingface.skeleton import skeleton
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LORA, LoraSpec
from collapipe.models.split import HEAD, ModelSpec
from collapipe.tensors import not_finite
from collapipe.text.vocabulary import Vocabulary

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _BASE = "base_model.model.", "base_model_name_or_path"
_log = logging.getLogger(__name__)
_OPTIONS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}  # ours → peft's
# Further fields of peft: any value, or values that leave the adapters plain.
_HARMLESS = (
    *("auto_mapping", _BASE, "inference_mode", "peft_version", "revision"),
    *("exclude_modules", "fan_in_fan_out", "layers_pattern", "layers_to_transform"),
    *("lora_dropout", "megatron_core", "modules_to_save", "qalora_group_size", "target_modules"),
    "task_type",
)
_PLAIN = {
    "bias": ("none",),
    "peft_type": ("LORA",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others change the base
}


def options_in(folder: Path) -> dict[str, Any]:
    """Return the options under ``adapter`` that the folder decides.

    ``target_modules`` are paths in a block, or their last components if the folder names layers
    so, or has an encoder and a decoder. Raises ``ConfigError`` if it holds no LoRA adapters, or
    some of a kind that runs do not train.
    """
    with _reading(folder):
        fields = dict(json.loads((folder / _CONFIG).read_text("utf-8")))
        with safe_open(folder / _WEIGHTS, "pt") as file:
            layers = [each.partition(LORA)[0] for each in file.keys() if LORA in each]  # noqa: SIM118
        if not layers:
            raise ValueError("it has no LoRA adapters")
    for name, value in fields.items():
        known = name in (*_OPTIONS.values(), *_HARMLESS) or value in _PLAIN.get(name, ())
        if value and not known:
            raise ConfigError(
                f"adapter.path={folder}: {_CONFIG} has {name}={one_line(value)}, and runs train "
                "plain LoRA adapters; name another folder"
            )
    options = {ours: fields.get(theirs) for ours, theirs in _OPTIONS.items()}
    for name in ("rank", "alpha"):
        if not isinstance(value := options[name], int | float) or not value > 0:
            raise ConfigError(
                f"adapter.path={folder}: {_CONFIG} has {_OPTIONS[name]}={one_line(value)}, which "
                "must be above 0; save it with peft's save_pretrained"
            )
    named, targets = fields.get("target_modules"), set[str]()
    parts = [re.split(r"\.\d+\.", layer, maxsplit=1) for layer in layers]  # at the block's number
    decodes = len({stack for stack, *_ in parts}) > 1  # its layers have other paths
    for *_, path in parts:
        end = path.rpartition(".")[2]
        targets.add(end if decodes or (isinstance(named, list) and end in named) else path)
    return {**options, "rslora": bool(options["rslora"]), "target_modules": sorted(targets)}


def begin_with(folder: Path, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Copy the folder's adapters into ``weights``, the state of a model of ``spec``.

    A task head is copied, too, if the folder has one; else it begins fresh. A warning tells if the
    folder names another model. Raises ``ConfigError`` if names or sizes are another model's.
    """
    lora, own = _with_adapters(f"adapter.path={folder}", spec, weights)
    wanted, own_base = _trained(lora, own), cast(HuggingFaceSpec, lora.base).name
    with _reading(folder):
        folder_base = dict(json.loads((folder / _CONFIG).read_text("utf-8"))).get(_BASE)
        stored = load_file(folder / _WEIGHTS)
        if (bad := not_finite(stored)) is not None:
            raise ValueError(f"{bad} has values that are not finite")
    found = {name.removeprefix(_PREFIX): weight for name, weight in stored.items()}
    lacking = [name for name in wanted if LORA in name and name not in found]
    others = [name for name in found if name not in wanted]
    misfits = [n for n in found if n in wanted and found[n].shape != wanted[n].shape]
    faults = {"lacks": lacking, "has further": others, "has another size of": misfits}
    for fault, names in faults.items():
        if names:
            raise ConfigError(
                f"adapter.path={folder}: {fault} {few_of(sorted(names), ', ')}; set model.name, "
                "model.head and adapter.last_blocks as in its training"
            )
    if folder_base and Path(str(folder_base)).name != Path(str(own_base)).name:
        _log.warning(
            "adapter.path=%s: was trained on %s, this run has %s", folder, folder_base, own_base
        )
    for name, weight in found.items():
        wanted[name].copy_(weight)


def write_adapter(
    spec: ModelSpec, vocabulary: Vocabulary, weights: Mapping[str, Tensor], folder: Path
) -> HuggingFaceSpec:
    """Write the trained weights as a folder of peft, and return the model that they adapt.

    Raises ``ConfigError`` if that model exists in this run alone.
    """
    lora, own = _with_adapters("--adapter", spec, weights)
    base = cast(HuggingFaceSpec, lora.base)
    num_layers = getattr(base.own_config, base.names.family.sizes[0])
    if not base.pretrained or (base.head != "causal" and base.names.num_blocks < num_layers):
        raise ConfigError(
            "--adapter: only this run has the frozen weights (model.pretrained=false, or fewer "
            "blocks than the model's layers); leave --adapter out"
        )
    model, trained = skeleton(base.run_config(vocabulary), base.class_name), _trained(lora, own)
    fields: dict[str, Any] = {}
    if base.head == "causal":  # its layers are alike, so their last names suffice
        fields["target_modules"] = [*(lora.target_modules or ())]
    if base.head == "causal" and lora.first_block:
        fields["layers_to_transform"] = [*range(lora.first_block, num_layers)]
    inner = f"{model.base_model_prefix}."  # of modules that are not the task head's own
    heads = {
        ".".join(name.split(".")[: 1 + name.startswith(inner)])
        for name in trained
        if LORA not in name
    }
    adapted = sorted({name.partition(LORA)[0] for name in trained if LORA in name})
    lora.peft_config(
        {name: model.get_submodule(name) for name in adapted},
        **{_BASE: base.name},
        task_type=CLASSES[str(base.head)][1],
        modules_to_save=sorted(heads) or None,
        lora_dropout=lora.dropout,
        inference_mode=True,
        **fields,
    ).save_pretrained(folder)
    tensors = {_PREFIX + name: weight.contiguous() for name, weight in trained.items()}
    (folder / _WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))  # with a new file's mode
    return base


def _with_adapters(
    option: str, spec: ModelSpec, weights: Mapping[str, Tensor]
) -> tuple[LoraSpec, Mapping[str, Tensor]]:
    """Return the model with adapters and its weights, without cut or stem."""
    lora, own = without_cut(spec, weights)
    if not isinstance(lora, LoraSpec) or not isinstance(lora.base, HuggingFaceSpec):
        raise ConfigError(f"{option}: needs a run with adapter=lora and model=huggingface")
    return lora, own


def _trained(spec: LoraSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return adapters, and weights of a task head, new to the model, by names in the original."""
    fully = f"{HEAD}." if spec.head in ("tokens", "pooled") else LORA
    to_original = cast(HuggingFaceSpec, spec.base).names.to_original
    return {
        to_original(ours).replace(".default.", "."): weight
        for ours, weight in weights.items()
        if LORA in ours or ours.startswith(fully)
    }


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Convert errors of reading into ``ConfigError``."""
    try:
        yield
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise ConfigError(
            f"adapter.path={folder}: needs {_CONFIG} and {_WEIGHTS} of peft ({one_line(error)}); "
            "save it with peft's save_pretrained (pickles are not read)"
        ) from error
