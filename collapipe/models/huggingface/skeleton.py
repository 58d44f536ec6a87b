"""Build the original model without memory, take a part out of it, and give the part weights."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from collapipe.errors import ConfigError, one_line
from collapipe.models.huggingface.configuration import SUPPORTED
from collapipe.models.huggingface.families import DECODERS
from collapipe.models.huggingface.layers import Absent
from collapipe.models.weights.without_values import WithoutValues

_MOST_POSITIONS = 2**20  # position tables may take memory even on torch's device meta
# Eager attention's softmax is in float32, where the least float64 is −∞ and a token that sees no
# other, as padding may, would become NaN and pass it on.
ALL_MASK_ATTENTION_FUNCTIONS.register(
    "eager", lambda **how: eager_mask(**{**how, "dtype": torch.float32})
)


def skeleton(config: Any, class_name: str) -> Any:
    """Return the whole model on torch's device ``meta``.

    Its attention is ``scaled_dot_product_attention`` unless transformers says that the model cannot
    use it (soft caps, sinks), or it adds biases that train (T5): without gradients torch would
    choose another kernel for these. Raises ``ConfigError`` if transformers cannot build the model.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rotary = config.model_type in DECODERS  # without a table
    if isinstance(positions, int) and positions > _MOST_POSITIONS and not rotary:
        raise ConfigError(
            f"model.name: max_position_embeddings={positions} of this {config.model_type} is more "
            f"than {_MOST_POSITIONS}; lower it in model.config or config.json"
        )
    try:
        with WithoutValues():
            model = getattr(transformers, class_name).from_config(
                config,
                attn_implementation="eager",  # config.json may name kernels of the hub
                experts_implementation="eager",
                dtype=torch.float32,  # also if config.json has a narrower one
                trust_remote_code=False,
            )
    except Exception as error:  # each model raises its own classes
        raise ConfigError(
            f"model.name: transformers cannot build a {config.model_type} of this config.json "
            f"({one_line(error)}); {SUPPORTED}"
        ) from error
    if model._supports_sdpa and not hasattr(config, "relative_attention_num_buckets"):
        model.set_attn_implementation("sdpa")
    return model


def strip(module: nn.Module, keep: Callable[[str], bool], prefix: str = "") -> None:
    """Replace every submodule by ``Absent`` if ``keep`` keeps no weight of it.

    ``keep`` gets a weight's full name. Submodules without weights stay, and so does a model whose
    last norm has none.
    """
    for name in [name for name in module._buffers if not keep(f"{prefix}{name}")]:
        if name not in module._non_persistent_buffers_set:
            del module._buffers[name]
    for name, child in list(module.named_children()):
        weights = [f"{prefix}{name}.{weight}" for weight in child.state_dict()]
        norm = getattr(child, "norm", None)
        plain_norm = isinstance(norm, nn.Module) and not norm.state_dict()  # of OLMo
        if not weights or plain_norm or any(map(keep, weights)):
            strip(child, keep, f"{prefix}{name}.")
        else:
            empty = isinstance(child, nn.ModuleList)
            module._modules[name] = nn.ModuleList() if empty else Absent(child)


def fill(part: nn.Module, model: Any, draw: bool) -> None:
    """Compute the constants of ``part`` of the skeleton ``model``, and ``draw`` its weights.

    Constants are, for example, rotary frequencies and sinusoidal positions. Weights are drawn as
    transformers does. Without ``draw`` they stay on torch's device ``meta``.
    """
    _constants_as_buffers(part)
    if not draw:
        drawn = [module for module in part.modules() if module._non_persistent_buffers_set]
        for module in drawn:
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(module.get_buffer(name), device="cpu")
        with torch.random.fork_rng(devices=[]):
            _initialise(drawn, model)
    else:
        part.to_empty(device="cpu")
        _initialise(list(part.modules()), model)


def _initialise(modules: list[nn.Module], model: Any) -> None:
    with torch.device("cpu"), torch.no_grad():
        for module in modules:
            if isinstance(module, PreTrainedModel):  # a whole model would use absent modules
                for buffer in module.buffers(recurse=False):
                    buffer.zero_()  # BART's and Marian's final_logits_bias
            else:
                model._init_weights(module)


def _constants_as_buffers(part: nn.Module) -> None:
    """Turn parameters that must not train into buffers. An embedding that must not train is a
    computed table (Marian's positions), so it is not persistent."""
    for module in part.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.requires_grad:
                del module._parameters[name]
                computed = isinstance(module, nn.Embedding)
                module.register_buffer(name, weight.data, persistent=not computed)
