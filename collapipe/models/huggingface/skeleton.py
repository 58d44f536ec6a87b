"""The original model without memory, how a part is taken out of it, and how that gets weights."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from collapipe.errors import ConfigError, one_line
from collapipe.models.huggingface.configuration import SUPPORTED

_MOST_POSITIONS = 2**20  # their tables may take memory also on torch's device meta


def skeleton(config: Any, class_name: str) -> Any:
    """The whole model on torch's device ``meta``, with attention in plain torch operations.

    Plain, because fused kernels draw dropout from torch's own generator. Raises ``ConfigError``.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > _MOST_POSITIONS:
        raise ConfigError(
            f"model.name: max_position_embeddings={positions} of this {config.model_type} is more "
            f"than {_MOST_POSITIONS}; lower it in model.config or config.json"
        )
    try:
        with torch.device("meta"):
            return getattr(transformers, class_name).from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
    except Exception as error:  # each model's code has kinds of its own
        raise ConfigError(
            f"model.name: transformers cannot build a {config.model_type} of this config.json "
            f"({one_line(error)}); {SUPPORTED}"
        ) from error


class Absent(nn.Module):
    """A module that another machine holds, and that nothing here calls."""


def strip(module: nn.Module, keep: Callable[[str], bool], prefix: str = "") -> None:
    """Take out every submodule with weights of which none is kept.

    ``keep`` is asked for weights by their full names. What has no weights stays.
    """
    for name in [name for name in module._buffers if not keep(f"{prefix}{name}")]:
        if name not in module._non_persistent_buffers_set:
            del module._buffers[name]
    for name, child in list(module.named_children()):
        weights = [f"{prefix}{name}.{weight}" for weight in child.state_dict()]
        if not weights or any(map(keep, weights)):
            strip(child, keep, f"{prefix}{name}.")
        else:
            empty = isinstance(child, nn.ModuleList)
            module._modules[name] = nn.ModuleList() if empty else Absent()


def fill(part: nn.Module, model: Any) -> nn.Module:
    """Give ``part``, taken out of the skeleton ``model``, what it computes with.

    Where torch's device is ``meta``, weights will come later, and only constants are computed,
    such as rotary frequencies and sinusoidal positions; elsewhere weights are drawn as
    transformers draws them, too.
    """
    _constants_as_buffers(part)
    if torch.get_default_device().type == "meta":
        drawn = [module for module in part.modules() if module._non_persistent_buffers_set]
        for module in drawn:
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(module.get_buffer(name), device="cpu")
        with torch.random.fork_rng(devices=[]):
            _initialise(drawn, model)
    else:
        part.to_empty(device="cpu")
        _initialise(list(part.modules()), model)
    return part


def _initialise(modules: list[nn.Module], model: Any) -> None:
    with torch.device("cpu"), torch.no_grad():
        for module in modules:
            if isinstance(module, PreTrainedModel):  # whole models would ask for what is absent
                for buffer in module.buffers(recurse=False):
                    buffer.zero_()  # BART's and Marian's final_logits_bias
            else:
                model._init_weights(module)


def _constants_as_buffers(part: nn.Module) -> None:
    """Parameters that must not train, Marian's positions, are constants: no part's weights."""
    for module in part.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, weight.data, persistent=False)
