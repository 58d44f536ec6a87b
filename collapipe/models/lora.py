"""LoRA (Hu et al. 2021) through peft: low-rank adapters train, and what they stand on is frozen.

``requires_grad`` alone says what trains. peft takes seconds to import, so only a run with adapters
does it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from collapipe.errors import ConfigError
from collapipe.models.dropout import Dropout
from collapipe.models.split import HEAD, DerivedSpec, ModelSpec, SplitModel, block_name, build_empty
from collapipe.models.stem import StemSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.sections import AdapterSettings, LoraSettings
from collapipe.seeds import derive
from collapipe.text.vocabulary import Vocabulary

_NOT_IN_PEFT = {"distilbert": ("q_lin", "v_lin"), "marian": ("q_proj", "v_proj")}


def with_adapters(model: ModelSpec, settings: AdapterSettings) -> ModelSpec:
    """``model``, with adapters where ``settings`` ask for them, and behind a frozen stem where
    they ask for those of the last blocks alone.

    Raises ``ConfigError`` where there are not so many blocks.
    """
    if not isinstance(settings, LoraSettings):
        return model
    options = settings.rank, settings.alpha, settings.dropout, settings.target_modules
    last = settings.last_blocks
    if last is None:
        return LoraSpec(model, *options)
    if last > model.num_blocks:
        raise ConfigError(
            f"adapter.last_blocks={last}: the model has {model.num_blocks} blocks; set one of "
            f"1 … {model.num_blocks}, or null for adapters in all blocks"
        )
    first = model.num_blocks - last
    return StemSpec(LoraSpec(model, *options, first), first)


@dataclass(frozen=True)
class LoraSpec(DerivedSpec):
    """A model whose linear layers W of certain names become W + B A · alpha / rank, W frozen.

    Its weights have peft's names: W ends in ``.base_layer.weight``, A and B in
    ``.lora_A.default.weight`` and ``.lora_B.default.weight``. B is zero at first, so that the first
    model is ``base``.

    ``dropout`` is of an adapter's input. ``target_modules`` are last names of linear layers; None:
    peft's for the family, queries and values of most. Blocks before
    ``first_block`` are frozen without adapters.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    first_block: int = 0

    def __post_init__(self) -> None:
        if self.target_modules is None:
            object.__setattr__(self, "target_modules", _default_targets(self.base))
        with torch.device("meta"):
            block = self.base.build_block(0)
        for target in self.target_modules or ("[]",):
            if not _linear_layers(block, (target,)):
                layers = _linear_layers(block, [name for name, _ in block.named_modules()])
                known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
                raise ConfigError(
                    f"adapter.target_modules={target}: a block has no linear layer of that name; "
                    f"it has {known}"
                )

    @property
    def num_blocks(self) -> int:
        return self.base.num_blocks

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return self.base.build_embedding(vocabulary).requires_grad_(False)

    def build_block(self, index: int) -> nn.Module:
        """Block ``index``, in which adapters alone train."""
        block = self.base.build_block(index)
        if index < self.first_block:
            return block.requires_grad_(False)
        return self._adapted(block_name(index), block)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        """A decoder, or a causal model's last layers, with adapters; a task's head as it is.

        A task's head is new to the model and trains in full, as peft's ``modules_to_save`` do.
        """
        from collapipe.models.huggingface.heads import CausalHead, TaskHead

        head = self.base.build_head(vocabulary)
        old = isinstance(head, CausalHead) or _linear_layers(head, self.target_modules)
        return self._adapted(HEAD, head) if old and not isinstance(head, TaskHead) else head

    def _adapted(self, name: str, part: nn.Module) -> nn.Module:
        """``part``, frozen but for the adapters that peft puts into it.

        They are drawn from the seed of torch's generator and the part's name, and take nothing
        from the stream that the weights of ``base`` are drawn from.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        part.requires_grad_(False)
        layers = _linear_layers(part, self.target_modules)
        if not layers:  # behind a causal model all of whose layers are blocks
            return part
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(layers),
            fan_in_fan_out=not any(isinstance(layer, nn.Linear) for layer in layers.values()),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(torch.initial_seed(), "adapter", name))
            inject_adapter_in_model(config, part)
        for layer in part.modules() if self.dropout else ():
            if isinstance(layer, LoraLayer):  # draws from the part's generator
                layer.lora_dropout["default"] = Dropout(self.dropout)
        return part


def merged(
    spec: LoraSpec, vocabulary: Vocabulary, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights of ``spec.base`` that compute what ``weights`` do; those stay as they are."""
    from peft.tuners.lora import LoraLayer

    own = {name: weight.detach() for name, weight in weights.items()}
    model = build_empty(lambda: SplitModel(spec, vocabulary), own)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)  # into a copy, and only if it is finite
            model.set_submodule(name, cast(nn.Module, layer.get_base_layer()))
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def _default_targets(base: ModelSpec) -> tuple[str, ...]:
    if isinstance(base, TransformerSpec):
        return "query", "value"
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    from collapipe.models.huggingface.spec import HuggingFaceSpec

    kind = type(base).__name__
    if isinstance(base, HuggingFaceSpec):
        kind = base.own_config.model_type
    targets = _NOT_IN_PEFT.get(kind) or KNOWN.get(kind)
    if targets is None:
        raise ConfigError(
            f"adapter.target_modules=null: nothing is known for a {kind}; list the last names of "
            "linear layers in its blocks, such as [query,value]"
        )
    return tuple(targets)


def _linear_layers(part: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """Layers of ``part`` that compute a product and no more, and whose path ends in one of
    ``names``."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's, with W transposed

    ends = tuple(f".{name}" for name in names or ())
    return {
        path: module
        for path, module in part.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{path}".endswith(ends)
    }
