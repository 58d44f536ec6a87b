"""A model of transformers as a ``ModelSpec``: its options, and how its parts are built."""

import copy
import functools
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collapipe.errors import ConfigError, few_of, one_line
from collapipe.models.copying import copied
from collapipe.models.huggingface import configuration, weights
from collapipe.models.huggingface.families import CLASSES, FAMILIES, OF_LABELS, Family, Names
from collapipe.models.huggingface.heads import TiedOutput
from collapipe.models.huggingface.layers import DecoderBlock, T5Block
from collapipe.models.huggingface.skeleton import fill, skeleton, strip
from collapipe.models.split import EMBEDDING, HEAD, TASKS, block_name
from collapipe.models.weights.kept import NARROW
from collapipe.tensors import Tensors, aligned, not_finite
from collapipe.text.vocabulary import Vocabulary

_log = logging.getLogger(__name__)
_PACKED = {"full_attention", "sliding_attention"}  # kinds of layers
_WITHOUT_POSITIONS = "afmoe", "gpt_oss"  # families whose masks ignore where sequences begin


@dataclass(frozen=True)
class HuggingFaceSpec:
    """A model by name; the options under ``model``."""

    # hub id, or a folder with ``config.json`` and, if pretrained, ``*.safetensors``
    name: str | None = None
    family: str | None = None  # ``model_type``, if ``config.json`` is too old to have it
    # L. None: all layers. A smaller number shortens an encoder; a causal model's other layers are
    # on the server.
    num_blocks: int | None = None
    # ``tokens`` or ``pooled`` (encoder-only), ``decoder``, ``causal``; None: the family's first
    head: str | None = None
    # Fields of ``config.json`` that this run changes, such as ``hidden_size``. Without ``name``
    # they change the family's defaults in transformers.
    config: dict[str, Any] | None = field(default=None, hash=False)
    pretrained: bool = False  # use the weights of ``name``; False: fresh for the task's vocabulary
    # how frozen weights are kept; ``float32``: as they compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    # how frozen weights of linear layers are kept instead; None: like all others
    quantization: Literal["int8", "nf4"] | None = None
    # Digest of the configuration, so that a model is another one once its folder has changed.
    digest: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        config, family = self.own_config, self._family
        text = config.to_json_string(use_diff=False)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())
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
            object.__setattr__(self, "head", next(iter(family.heads)))
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
    def kept_dtype(self) -> str:
        """Name of the dtype in which frozen weights are kept."""
        if self.dtype != "auto":
            return self.dtype
        return self.published_dtype if self.pretrained else "float32"

    @property
    def published_dtype(self) -> str:
        """Name of the narrow dtype that ``config.json`` names, else ``float32``."""
        own = str(self.own_config.dtype).removeprefix("torch.")
        return own if own in NARROW else "float32"

    @property
    def wide_names(self) -> dict[str, str]:
        """Narrow dtype → pattern of the weights' names that transformers does not keep in it."""
        model = _skeleton(self, None)
        always, half = model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules
        return {"bfloat16": "|".join(always), "float16": "|".join({*always, *half})}

    @property
    def _called(self) -> str:
        return f"model.name={self.name}" if self.name else f"model.family={self.family}"

    @property
    def dim(self) -> int:
        return int(self.own_config.hidden_size)

    @property
    def packs(self) -> bool:
        """Whether several sequences can share a row: a token's layers mix it with others by
        attention alone, whose masks are the model's own."""
        config = self.own_config
        kinds = {*(getattr(config, "layer_types", None) or ())}
        masked = self._family.block is DecoderBlock and config.model_type not in _WITHOUT_POSITIONS
        return masked and kinds <= _PACKED

    @property
    def table_rows(self) -> int:
        """Rows of T5's table of positions, which its first block appends; 0 for other models."""
        if self._family.block is not T5Block:
            return 0
        config = self.own_config
        buckets, heads = config.relative_attention_num_buckets, config.num_heads
        return math.ceil(int(buckets) * int(heads) / self.dim)

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        model = copied(_end(self, vocabulary, EMBEDDING))
        return self._filled(EMBEDDING, self._family.embed(model), model, vocabulary)

    def build_block(self, index: int) -> nn.Module:
        """Build a block that wraps the original layer ``index``."""
        model, family = _skeleton(self, None), self._family
        layer = copied(model.get_submodule(family.layers)[index])
        return self._filled(block_name(index), family.block(layer, model, index), model, None)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        model = copied(_end(self, vocabulary, HEAD))
        copies = self.copies(vocabulary)
        if "lm_head.weight" in copies:
            source = copies["lm_head.weight"].removesuffix(".weight")
            model.lm_head = TiedOutput(model.get_submodule(source))
        head = self._family.heads[str(self.head)](model)
        part = self._filled(HEAD, head, model, vocabulary)
        if torch.get_default_device().type != "meta":
            self.forget()  # SplitModel builds the head last
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
        configuration.check_portable(family, config)
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
        config = copy.deepcopy(self.own_config)
        configuration.keep_to_blocks(config, self.num_blocks, self._called)
        if vocabulary is not None:
            if self.head in OF_LABELS:
                configuration.set_labels(config, vocabulary, self.head)
            if self.pretrained:
                configuration.check_knows(config, vocabulary, self._called)
            else:
                configuration.fit(config, vocabulary)
        return config

    def forget(self) -> None:
        """Release the weights of the whole model that building parts may have read."""
        for cached in (_stored, _places, _sources, _converted):
            cached.cache_clear()

    def stored(self, source: str | None = None) -> weights.Stored | None:
        """Return the files of the pretrained model's weights, or of another folder or hub id
        ``source``; None if they are not on this machine. The hub is not asked."""
        if name := source or (self.name if self.pretrained else None):
            with weights.reading(name), suppress(OSError):
                return weights.stored(name, local=True)
        return None

    def published(self, like: Mapping[str, Tensor], there: weights.Stored) -> Tensors | None:
        """Return weights of one part with the names, shapes and dtypes of ``like``; None unless
        the files have all of them."""
        wanted = {self.names.to_original(ours): each for ours, each in like.items()}
        with weights.reading(self.name or there.files[0].parent), suppress(OSError):
            found = _read(self, there, wanted)
            return found and dict(zip(like, found.values(), strict=True))
        return None

    def copies(self, vocabulary: Vocabulary | None) -> dict[str, str]:
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
        return CLASSES[str(self.head)][0]

    def _filled(
        self, name: str, part: nn.Module, model: Any, vocabulary: Vocabulary | None
    ) -> nn.Module:
        """Give a part of the skeleton ``model`` its weights, except on torch's device meta."""
        empty = torch.get_default_device().type == "meta"
        loads = self.pretrained and not empty
        whole = loads and self.head not in OF_LABELS  # nothing is drawn, so all may be mapped
        fill(part, model, draw=not (empty or whole))
        if not loads:
            return part
        own, found = part.state_dict(), None
        original = {key: self.names.to_original(f"{name}.{key}") for key in own}
        if whole:
            there = _stored(self)
            with weights.reading(str(self.name)):
                found = _read(self, there, {original[key]: each for key, each in own.items()})
        if found is None:
            labelled = name == HEAD and self.head in OF_LABELS
            all_weights = _converted(self, vocabulary if labelled else None)
            found = {theirs: all_weights[theirs].clone() for theirs in original.values()}
        values = {ours: aligned(found[theirs]) for ours, theirs in original.items()}
        if (bad := not_finite(values)) is not None:
            raise ConfigError(
                f"{self._called}: {original[bad]} has values that are not finite; name another "
                "folder"
            )
        part.load_state_dict(values, assign=True)
        return part


@functools.lru_cache(maxsize=8)  # every part asks for it, and nothing changes it
def _skeleton(spec: HuggingFaceSpec, vocabulary: Vocabulary | None) -> Any:
    return skeleton(spec.run_config(vocabulary), spec.class_name)


@functools.lru_cache(maxsize=16)  # copied for each unit and round
def _end(spec: HuggingFaceSpec, vocabulary: Vocabulary, part: str) -> Any:
    """Return a copy of the skeleton, stripped to the ``part``: the embedding or the head."""
    model = copied(_skeleton(spec, vocabulary))
    copies = spec.copies(vocabulary) if part == HEAD else {}
    strip(model, lambda name: spec.names.part(name) == part and name not in copies)
    return model


@functools.lru_cache(maxsize=1)  # every part asks for it
def _stored(spec: HuggingFaceSpec) -> weights.Stored:
    """Return the files of the model's weights, for building it."""
    return weights.checked(str(spec.name), spec.own_config)


def _read(
    spec: HuggingFaceSpec, there: weights.Stored, like: Mapping[str, Tensor]
) -> Tensors | None:
    """Return weights of one part by their original names, with the shapes and dtypes of ``like``;
    None unless the files have all, or the tensors of which transformers makes them."""
    places = _places(spec, there)
    if (found := weights.mapped(places, like)) is not None:
        return found
    of = _sources(spec, there)[spec.names.part(next(iter(like)))]
    return weights.made(places, of, like, _skeleton(spec, None))


@functools.lru_cache(maxsize=2)  # every part asks for it
def _places(spec: HuggingFaceSpec, there: weights.Stored) -> weights.Places:
    """Return where the model's weights lie, also those that the original shares, and that may be in
    its files under one name."""
    found = dict(weights.places(there.files))
    shared = [(source, copy) for copy, source in spec.copies(None).items()]
    twins = spec._family.twins
    if twins is not None and spec.untied():
        shared += [twins, twins[::-1]]
    for name, other in shared:
        if other in found:
            found.setdefault(name, found[other])
    return found


@functools.lru_cache(maxsize=2)  # as above
def _sources(
    spec: HuggingFaceSpec, there: weights.Stored
) -> Mapping[str, dict[str, weights.Sources]]:
    """Return of which tensors the weights of each part are made."""
    parts = defaultdict[str, dict[str, weights.Sources]](dict)
    for weight, each in weights.sources(_places(spec, there), _skeleton(spec, None)).items():
        parts[spec.names.part(weight)][weight] = each
    return parts


@functools.lru_cache(maxsize=1)  # read once for all parts
def _converted(spec: HuggingFaceSpec, vocabulary: Vocabulary | None) -> Tensors:
    """Return the weights of the whole model by original names, as transformers reads them."""
    config = spec.run_config(vocabulary)
    config.tie_word_embeddings = spec.own_config.tie_word_embeddings  # T5 1.1 needs it here
    kind = type(_skeleton(spec, vocabulary))
    found, missing, misfits = weights.converted(str(spec.name), _stored(spec).files, kind, config)
    _check_complete(spec, missing, misfits)
    return found


def _check_complete(spec: HuggingFaceSpec, missing: set[str], misfits: set[str]) -> None:
    """Raise ``ConfigError`` for missing or unfit weights; a head of labels may start fresh."""
    exempt = HEAD if spec.head in OF_LABELS else None
    if lacking := sorted(n for n in missing | misfits if spec.names.part(n) != exempt):
        raise ConfigError(
            f"model.name={spec.name}: {len(lacking)} tensors of the model are not in its weights, "
            f"or have another shape there ({one_line(few_of(lacking))}); save the whole model, or "
            "set model.pretrained=false for fresh weights"
        )
    if misfits:
        _log.warning("%s: its head is of other labels, and begins fresh", spec._called)
