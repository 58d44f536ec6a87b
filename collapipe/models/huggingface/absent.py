"""What stands in a part of a model for the modules that other machines hold."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling


class Absent(nn.Module):
    """A module that another machine holds, and that nothing here calls."""


class Encoded(nn.Module):
    """An encoder that another machine has run: it returns what it is given."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *none: None, inputs_embeds: Tensor, **named: Any) -> Any:
        """What the encoder would return whose last layer's activation is ``inputs_embeds``."""
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(inputs_embeds, pooled)


class TiedOutput(nn.Module):
    """An output layer that uses the weights of an embedding on the same machine."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a submodule: its weight has one name

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, d] → […, vocabulary]."""
        return functional.linear(hidden, self._embedding[0].weight)


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
