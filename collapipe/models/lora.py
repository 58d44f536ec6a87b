"""LoRA (Hu et al. 2021) through peft: low-rank adapters train, the base weights are frozen.

``requires_grad`` alone marks the weights that train. peft takes seconds to import, so only runs
with adapters import it.
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
    """Add the adapters of ``settings`` to ``model``; return ``model`` itself without LoRA.

    With ``last_blocks`` the blocks before them become a frozen stem. Raises ``ConfigError`` if the
    model has fewer blocks than ``last_blocks``.
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
    """Model whose named linear layers W become W + B A · alpha / rank with W frozen.

    Weights have peft's names: ``….base_layer.weight`` for W, ``….lora_A.default.weight`` and
    ``….lora_B.default.weight`` for A and B. B starts at zero, so the initial model equals ``base``.

    ``dropout`` applies to an adapter's input. ``target_modules`` are last path components of linear
    layers; None selects peft's default for the family, usually queries and values. Blocks before
    ``first_block`` are frozen and have no adapters.
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
        """Build block ``index``, in which only adapters train."""
        block = self.base.build_block(index)
        if index < self.first_block:
            return block.requires_grad_(False)
        return self._adapted(block_name(index), block)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        """Build the head: a decoder or a causal model's last layers get adapters, a task head none.

        A task head is new to the model and trains fully, like peft's ``modules_to_save``.
        """
        from collapipe.models.huggingface.heads import CausalHead, TaskHead

        head = self.base.build_head(vocabulary)
        old = isinstance(head, CausalHead) or _linear_layers(head, self.target_modules)
        return self._adapted(HEAD, head) if old and not isinstance(head, TaskHead) else head

    def _adapted(self, name: str, part: nn.Module) -> nn.Module:
        """Freeze ``part`` and add peft's adapters to it.

        Adapters are drawn from the seed of torch's generator and the part's name. The stream from
        which the weights of ``base`` are drawn does not advance.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        part.requires_grad_(False)
        layers = _linear_layers(part, self.target_modules)
        if not layers:  # the head of a causal model whose layers are all blocks
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
    """Return weights of ``spec.base`` with the adapters merged in; ``weights`` do not change."""
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
    """Return the linear layers of ``part`` whose path ends in one of ``names``."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's, with W transposed

    ends = tuple(f".{name}" for name in names or ())
    return {
        path: module
        for path, module in part.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{path}".endswith(ends)
    }
