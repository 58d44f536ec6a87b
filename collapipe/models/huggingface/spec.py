"""A model of transformers as a ``ModelSpec``: its options, and how its parts are built."""

import copy
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from collapipe.errors import ConfigError, few_of, one_line
from collapipe.models.huggingface import configuration
from collapipe.models.huggingface.families import CLASSES, FAMILIES, Family, Names
from collapipe.models.huggingface.heads import TiedOutput
from collapipe.models.huggingface.skeleton import fill, skeleton, strip
from collapipe.models.split import EMBEDDING, HEAD, TASKS, block_name
from collapipe.text.vocabulary import Vocabulary

_log = logging.getLogger(__name__)
# Hide transformers' coloured table of missing weights: ``_check_complete`` reports what matters.
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in str(record.msg)
)
_WRAPPERS = "_orig_mod.", "module."  # name prefixes that torch.compile and DataParallel add


@dataclass(frozen=True)
class HuggingFaceSpec:
    """A model by name; the options under ``model``.

    Attributes
    ----------
    name
        Hub id, or a folder with ``config.json`` and, if pretrained, ``*.safetensors``.
    family
        ``model_type``, if ``config.json`` is too old to have it.
    num_blocks
        L. None: all layers. A smaller number shortens an encoder; a causal model's other layers
        are on the server.
    head
        ``tokens`` or ``pooled`` (encoder-only), ``decoder``, ``causal``; None: the family's first.
    config
        Fields of ``config.json`` that this run changes, such as ``hidden_size``. Without ``name``
        they change the family's defaults in transformers.
    pretrained
        Whether to start with the weights of ``name``; else with fresh ones for the task's
        vocabulary.
    """

    name: str | None = None
    family: str | None = None
    num_blocks: int | None = None
    head: str | None = None
    config: dict[str, Any] | None = field(default=None, hash=False)
    pretrained: bool = False

    def __post_init__(self) -> None:
        config, family = self.own_config, self._family
        layers = getattr(config, family.sizes[0])
        if self.num_blocks is None:
            object.__setattr__(self, "num_blocks", layers)
        if not 1 <= self.names.num_blocks <= layers:
            raise ConfigError(
                f"model.num_blocks={self.num_blocks}: {self._called} has {layers} layers "
                f"of which 1 to {layers} can be blocks; lower model.num_blocks; "
                f"{configuration.SUPPORTED}"
            )
        if self.head is None:
            object.__setattr__(self, "head", family.heads[0])
        if self.head not in family.heads:
            tasks = " or ".join(TASKS[head] for head in family.heads)
            raise ConfigError(
                f"model.head={self.head}: a {config.model_type} has {' or '.join(family.heads)}; "
                f"set {tasks}; {configuration.SUPPORTED}"
            )
        if self.pretrained and (self.name is None or self.config):
            raise ConfigError("model.pretrained=true: needs model.name, and no model.config")
        _skeleton(self, None)  # fail now, not on the units, if it cannot be built

    @property
    def own_tokenizer(self) -> str | None:
        """Name of the tokeniser that pretrained weights require; None for fresh weights."""
        return self.name if self.pretrained else None

    @property
    def _called(self) -> str:
        return f"model.name={self.name}" if self.name else f"model.family={self.family}"

    @property
    def dim(self) -> int:
        return int(self.own_config.hidden_size)

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        model = copy.deepcopy(_ends(self, vocabulary)[EMBEDDING])
        return self._filled(EMBEDDING, self._family.embed(model), model, vocabulary)

    def build_block(self, index: int) -> nn.Module:
        """Build a block that wraps the original layer ``index``."""
        model, family = _skeleton(self, None), self._family
        layer = copy.deepcopy(model.get_submodule(family.layers)[index])
        return self._filled(block_name(index), family.block(layer, model, index), model, None)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        model = copy.deepcopy(_ends(self, vocabulary)[HEAD])
        copies = self.copies(vocabulary)
        if "lm_head.weight" in copies:
            source = copies["lm_head.weight"].removesuffix(".weight")
            model.lm_head = TiedOutput(model.get_submodule(source))
        head = self._family.build_head(str(self.head), model, self.names.num_blocks)
        part = self._filled(HEAD, head, model, vocabulary)
        if torch.get_default_device().type != "meta":
            _pretrained.cache_clear()  # SplitModel builds the head last
            if self.untied():
                _log.warning(
                    "%s shares one embedding between input and output; here the control "
                    "units and the server train separate copies",
                    self._called,
                )
        return part

    @property
    def names(self) -> Names:
        """The map between the original's weight names and ours."""
        assert self.num_blocks is not None
        return Names(self._family, self.num_blocks)

    def portable(self) -> dict[str, Any]:
        """Return family, sizes and changed configuration fields, without weights.

        A machine without the folder or the hub can build the same parts from them.
        """
        family, config = self.own_config.model_type, self.own_config.to_dict()
        default = configuration.portable_fields(family)
        changed = {name: config[name] for name in default if config.get(name) != default[name]}
        sizes = {"num_blocks": self.num_blocks, "head": self.head}
        return {"family": family, **sizes, "config": changed}

    @classmethod
    def from_portable(cls, values: Mapping[str, Any]) -> "HuggingFaceSpec":
        """Return the model that ``portable`` described, without reading files or the network.

        Raises ``ConfigError`` for an unknown family or field, or an invalid value.
        """
        family, config = str(values["family"]), values["config"]
        if family not in FAMILIES or values.keys() != {"family", "num_blocks", "head", "config"}:
            raise ConfigError(f"model.family={family[:40]}: unknown; {configuration.SUPPORTED}")
        known = configuration.portable_fields(family)
        for name, value in config.items():
            if name not in known or not isinstance(value, str | int | float | list | dict | None):
                raise ConfigError(
                    f"model.config.{name[:40]}: a {family} has no such field or value"
                )
        return cls(None, family, int(values["num_blocks"]), str(values["head"]), dict(config))

    @functools.cached_property
    def own_config(self) -> Any:
        """The configuration of ``name`` with the changes of ``config``; do not modify it."""
        return configuration.change(configuration.read(self.name, self.family), self.config or {})

    @property
    def _family(self) -> Family:
        return FAMILIES[self.own_config.model_type]

    def run_config(self, vocabulary: Vocabulary | None) -> Any:
        """Return the model's configuration in this run.

        Raises ``ConfigError`` if the model cannot predict the vocabulary's tokens or labels.
        """
        config, family = copy.deepcopy(self.own_config), self._family
        for name in ("encoder_layerdrop", "decoder_layerdrop"):
            if hasattr(config, name):  # torch's own generator would decide which layers to drop
                setattr(config, name, 0.0)
        if "causal" not in family.heads:  # a causal head has the layers after the blocks
            setattr(config, family.sizes[0], self.num_blocks)
        if not getattr(config, "scale_decoder_outputs", True):  # T5 1.1 has untied weights,
            config.tie_word_embeddings = False  # but transformers would tie them
        if vocabulary is None:
            return config
        if self.head in ("tokens", "pooled"):
            if vocabulary.num_labels < 2:
                raise ConfigError(
                    f"model.head={self.head}: predicts one of two labels or more, the training "
                    f"rows have {vocabulary.num_labels}; correct the column of labels, or take "
                    "other rows"
                )
            config.num_labels = vocabulary.num_labels
        if not self.pretrained:
            configuration.fit(config, vocabulary)
        elif vocabulary.size > config.vocab_size:
            raise ConfigError(
                f"model.name={self.name}: knows {config.vocab_size} tokens, the run's tokeniser "
                f"has {vocabulary.size}; leave data.tokenizer to the model, or set "
                "model.pretrained=false"
            )
        return config

    def copies(self, vocabulary: Vocabulary) -> dict[str, str]:
        """Return weights of the original that are not stored here → the weights they copy."""
        return self._family.copies_in(_skeleton(self, vocabulary))

    def untied(self) -> dict[str, str]:
        """Return weight of the embedding → weight of the head, if the original shares the two."""
        twins, config = self._family.twins, self.own_config
        between = getattr(config, "share_encoder_decoder_embeddings", True)
        if twins is None or not (config.tie_word_embeddings and between):
            return {}
        return {self.names.to_ours(twins[0]): self.names.to_ours(twins[1])}

    @property
    def class_name(self) -> str:
        """Name of transformers' class of the whole model."""
        return CLASSES[str(self.head)]

    def _filled(
        self, name: str, part: nn.Module, model: Any, vocabulary: Vocabulary | None
    ) -> nn.Module:
        fill(part, model)
        if self.pretrained and torch.get_default_device().type != "meta":
            weights = _pretrained(self, vocabulary if name == HEAD else None)
            original = {key: self.names.to_original(f"{name}.{key}") for key in part.state_dict()}
            part.load_state_dict({ours: weights[theirs] for ours, theirs in original.items()})
        return part


@functools.lru_cache(maxsize=8)  # every part asks for it, and nothing changes it
def _skeleton(spec: HuggingFaceSpec, vocabulary: Vocabulary | None) -> Any:
    return skeleton(spec.run_config(vocabulary), spec.class_name)


@functools.lru_cache(maxsize=8)  # a copy of either is made for each unit and round
def _ends(spec: HuggingFaceSpec, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return two copies of the skeleton, stripped to the embedding and to the head."""
    embedding, head = (copy.deepcopy(_skeleton(spec, vocabulary)) for _ in range(2))
    copies = spec.copies(vocabulary)
    strip(embedding, lambda name: spec.names.part(name) == EMBEDDING)
    strip(head, lambda name: spec.names.part(name) == HEAD and name not in copies)
    return {EMBEDDING: embedding, HEAD: head}


@functools.lru_cache(maxsize=1)  # read once for all parts
def _pretrained(spec: HuggingFaceSpec, vocabulary: Vocabulary | None) -> dict[str, torch.Tensor]:
    """Return the model's weights by original names, without unpickling or running its code."""
    config = spec.run_config(vocabulary)
    if getattr(config, "quantization_config", None) is not None:  # other libraries would read it
        raise ConfigError(
            f"model.name={spec.name}: holds quantised weights, which cannot be trained; name the "
            "model that they were made of"
        )
    config.transformers_weights = None  # a field of config.json that may name a pickle
    config.tie_word_embeddings = spec.own_config.tie_word_embeddings  # T5 1.1 needs it here
    cached = {"local_files_only": bool(configuration.hub_silence(str(spec.name)))}
    if find_adapter_config_file(spec.name, **cached):  # transformers would load its base model
        raise ConfigError(
            f"model.name={spec.name}: holds an adapter; merge it into its model with peft, save "
            "that, and name its folder"
        )
    try:
        model, told = type(_skeleton(spec, vocabulary)).from_pretrained(
            None,
            config=config,
            state_dict=_unwrapped(_tensors(functools.partial(cached_file, spec.name, **cached))),
            attn_implementation="eager",  # config.json may name a kernel of the hub
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ImportError, OSError, LookupError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model.name={spec.name}: cannot read weights from safetensors ({one_line(error)}); "
            "set model.pretrained=false for fresh ones"
        ) from error
    _check_complete(spec, told["missing_keys"], {name for name, *_ in told["mismatched_keys"]})
    return dict(model.state_dict())


def _check_complete(spec: HuggingFaceSpec, missing: set[str], misfits: set[str]) -> None:
    """Raise ``ConfigError`` if weights are ``missing`` or have the wrong shape (``misfits``).

    Weights of a head that predicts labels are exempt: they may start fresh.
    """
    exempt = HEAD if spec.head in ("tokens", "pooled") else None
    if lacking := sorted(n for n in missing | misfits if spec.names.part(n) != exempt):
        raise ConfigError(
            f"model.name={spec.name}: {len(lacking)} tensors of the model are not in its weights, "
            f"or have another shape there ({one_line(few_of(lacking))}); save the whole model, or "
            "set model.pretrained=false for fresh weights"
        )
    if misfits:
        _log.warning("%s: its head is of other labels, and begins fresh", spec._called)


def _unwrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove the name prefixes that torch.compile and DataParallel add."""
    for prefix in _WRAPPERS * 2:  # in either order
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): each for name, each in tensors.items()}
    return tensors


def _tensors(fetch: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's safetensors files.

    transformers' own reader could be led to pickles by an index or a field of ``config.json``.
    """
    whole = fetch("model.safetensors", _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        return load_file(whole)
    index = json.loads(Path(fetch("model.safetensors.index.json")).read_text("utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        if re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard) is None:
            raise ValueError(f"its index names {shard[:80]!r}")
        tensors |= load_file(fetch(shard))
    return tensors
