"""LoRA (Hu et al. 2021) through peft: low-rank adapters train, the base weights are frozen.

``requires_grad`` alone marks the weights that train. peft takes seconds to import, so only runs
with adapters import it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from collapipe.errors import ConfigError
from collapipe.models.dropout import Dropout
from collapipe.models.split import HEAD, DerivedSpec, ModelSpec, block_name, kinds_of_blocks
from collapipe.models.stem import StemSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.models.weights.kept import NARROW, WIDE, keep, widen
from collapipe.models.weights.quantised import QUANTISED
from collapipe.models.weights.without_values import WithoutValues
from collapipe.sections import AdapterSettings, LoraSettings
from collapipe.seeds import derive
from collapipe.text.vocabulary import Vocabulary

# Names of layers that make queries or values, in all families and whichever attention they have.
_ATTENTION = re.compile(
    r"query|value|q|v|[qv]_lin|Wqkv|c_attn"
    r"|(q|v|kv|qkv)(_b)?_proj|in_proj(_qkvz?)?|query_key_value"
)
LORA = ".lora_"  # in the names of adapters' weights
_OPTIONS = "rank", "alpha", "dropout", "target_modules", "rslora"


def with_adapters(
    model: ModelSpec, settings: AdapterSettings, computes: str = "float32"
) -> ModelSpec:
    """Add the adapters of ``settings`` to ``model``, which ``computes`` in a dtype; return
    ``model`` itself without LoRA.

    With ``last_blocks`` the blocks before them become a frozen stem. Raises ``ConfigError`` if the
    model has fewer blocks than ``last_blocks``, or none of its weights are frozen and it has a
    dtype for those.
    """
    if not isinstance(settings, LoraSettings):
        for option, neutral in (("dtype", "auto"), ("quantization", "null")):
            if (value := getattr(model, option, None)) in (*NARROW, *QUANTISED):
                raise ConfigError(
                    f"model.{option}={value}: is how frozen weights are kept, and all weights "
                    f"train; set adapter=lora, or model.{option}={neutral}"
                )
        return model
    last, options = settings.last_blocks, {name: getattr(settings, name) for name in _OPTIONS}
    options |= {
        "kept": getattr(model, "kept_dtype", "float32"),
        "computes": computes,
        "quantization": getattr(model, "quantization", None),
    }
    if last is None:
        return LoraSpec(model, **options)
    if last > model.num_blocks:
        raise ConfigError(
            f"adapter.last_blocks={last}: the model has {model.num_blocks} blocks; set one of "
            f"1 … {model.num_blocks}, or null for adapters in all blocks"
        )
    first = model.num_blocks - last
    return StemSpec(LoraSpec(model, first_block=first, **options), first)


@dataclass(frozen=True)
class LoraSpec(DerivedSpec):
    """Model whose named linear layers W become W + B A · alpha / rank with W frozen.

    With ``rslora`` they become W + B A · alpha / √rank (Kalajdzievski 2023).

    Weights have peft's names: ``….base_layer.weight`` for W, ``….lora_A.default.weight`` and
    ``….lora_B.default.weight`` for A and B. B starts at zero, so the initial model equals ``base``.

    ``dropout`` applies to an adapter's input. ``target_modules`` are last path components of linear
    layers; None selects the family's layers of queries and values. Blocks before ``first_block``
    are frozen and have no adapters. Frozen weights are ``kept`` in a dtype, those of linear layers
    with ``quantization``, and compute in the dtype ``computes``.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    first_block: int = 0
    kept: str = "float32"
    computes: str = "float32"
    quantization: str | None = None
    rslora: bool = False

    def __post_init__(self) -> None:
        kept, computes, quantization = self.kept, self.computes, self.quantization
        if not {kept, computes} <= {*NARROW, *WIDE} or computes not in WIDE:
            raise ConfigError(f"frozen weights in {kept} cannot compute in {computes}; set float32")
        if quantization not in (*QUANTISED, None):
            raise ConfigError(f"model.quantization={quantization}: must be int8, nf4 or null")
        if self.target_modules is None:
            object.__setattr__(self, "target_modules", _default_targets(self.base))
        blocks = _one_of_each_kind(self.base, self.first_block)
        for target in self.target_modules or ("[]",):
            if not _linear_layers(blocks, (target,)):
                raise ConfigError(
                    f"adapter.target_modules={target}: no block has a linear layer of that name; "
                    f"they have {', '.join(_names_of_linear_layers(blocks))}"
                )

    @property
    def num_blocks(self) -> int:
        return self.base.num_blocks

    def name_in_base(self, name: str) -> str:
        return name.replace(".base_layer.", ".")

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return self._kept(self.base.build_embedding(vocabulary).requires_grad_(False))

    def build_block(self, index: int) -> nn.Module:
        """Build block ``index``, in which only adapters train."""
        block = self.base.build_block(index)
        if index < self.first_block:
            return self._kept(block.requires_grad_(False))
        return self._adapted(block_name(index), block)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        """Build the head: a decoder or a causal model's last layers get adapters, a task head none.

        A task head is new to the model and trains fully, like peft's ``modules_to_save``.
        """
        from collapipe.models.huggingface.heads import CausalHead, TaskHead

        head = self.base.build_head(vocabulary)
        old = isinstance(head, CausalHead) or _linear_layers(head, self.target_modules)
        return self._adapted(HEAD, head) if old and not isinstance(head, TaskHead) else head

    def peft_config(self, layers: Mapping[str, nn.Module], **more: Any) -> Any:
        """Return peft's ``LoraConfig`` for ``layers``, which are linear, with ``more`` fields."""
        from peft import LoraConfig

        transposed = not any(isinstance(layer, nn.Linear) for layer in layers.values())
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rslora,
            fan_in_fan_out=transposed,
            **{"target_modules": list(layers), **more},
        )

    def _adapted(self, name: str, part: nn.Module) -> nn.Module:
        """Freeze ``part`` and add peft's adapters to it.

        Adapters are drawn from the seed of torch's generator and the part's name. The stream from
        which the weights of ``base`` are drawn does not advance.
        """
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        part.requires_grad_(False)
        layers = _linear_layers(part, self.target_modules)
        if not layers:  # the head of a causal model whose layers are all blocks
            return self._kept(part)
        config = self.peft_config(layers)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(torch.initial_seed(), "adapter", name))
            inject_adapter_in_model(config, part)
        for layer in part.modules() if self.dropout else ():
            if isinstance(layer, LoraLayer):  # draws from the part's generator
                layer.lora_dropout["default"] = Dropout(self.dropout)
        return self._kept(part)

    def _kept(self, part: nn.Module) -> nn.Module:
        wide = getattr(self.base, "wide_names", {}).get(self.kept)
        return keep(part, self.kept, self.computes, self.quantization, wide)


def kept_as(spec: ModelSpec) -> str | None:
    """Return how frozen weights are kept, if not as wide as they compute."""
    while isinstance(spec, DerivedSpec):
        if isinstance(spec, LoraSpec):
            return spec.quantization or (spec.kept if spec.kept in NARROW else None)
        spec = spec.base
    return None


def merge_adapters(model: nn.Module) -> None:
    """Replace each layer with adapters by a plain one of merged weights.

    The tensors that the model was given do not change.
    """
    widen(model)
    adapted = [(name, each) for name, each in model.named_modules() if hasattr(each, "lora_A")]
    for name, layer in cast(list[tuple[str, Any]], adapted):
        layer.merge(safe_merge=True)  # into a copy, and only if it is finite
        model.set_submodule(name, layer.get_base_layer())


def _default_targets(base: ModelSpec) -> tuple[str, ...]:
    if not isinstance(base, TransformerSpec) and not hasattr(base, "own_config"):
        raise ConfigError(
            f"adapter.target_modules=null: nothing is known for a {type(base).__name__}; list the "
            "last names of linear layers in its blocks, such as [query,value]"
        )
    names = _names_of_linear_layers(_one_of_each_kind(base))
    return tuple(name for name in names if _ATTENTION.fullmatch(name))


def _one_of_each_kind(spec: ModelSpec, start: int = 0) -> nn.ModuleList:
    """Return meta blocks, from number ``start`` on."""
    with WithoutValues():
        return nn.ModuleList(map(spec.build_block, kinds_of_blocks(spec, start)))


def _names_of_linear_layers(part: nn.Module) -> list[str]:
    """Return the last components of their paths."""
    ends = {name.rpartition(".")[2] for name, _ in part.named_modules()}
    return sorted(end for end in ends if _linear_layers(part, (end,)))


def _linear_layers(part: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the linear layers of ``part`` whose path ends in one of ``names``."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's, with W transposed

    ends = tuple(f".{name}" for name in names or ())
    return {
        path: module
        for path, module in part.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{path}".endswith(ends)
    }
