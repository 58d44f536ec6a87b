"""The tensors of a block, by which each end checks the parts that the other end sends."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.errors import WireError
from collapipe.models.copying import copied
from collapipe.models.part import state_like
from collapipe.models.split import ModelSpec, block_name, training_names
from collapipe.models.weights.kept import in_dtype
from collapipe.models.weights.without_values import WithoutValues
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors, aligned


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Names, shapes and dtypes of a block's weights and optimiser state.

    ``tensors`` are meta tensors by their names in the whole model. A part may hold any of them, and
    all parts together hold the ``trained`` weights and no state without the rest of its kind.
    ``empty`` is the block without values.
    """

    tensors: Tensors
    trained: frozenset[str]
    empty: nn.Module

    @property
    def weights(self) -> frozenset[str]:
        """Names of the weights."""
        return frozenset(key for key in self.tensors if "/" not in key)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor; 0 for a block without tensors."""
        return max((each.nbytes for each in self.tensors.values()), default=0)

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy: the trained weights and the optimiser state."""
        return sum(t.nbytes for key, t in self.tensors.items() if "/" in key or key in self.trained)

    @property
    def constant_bytes(self) -> int:
        """Bytes of constants such as rotary frequencies, which have values without weights, too."""
        return sum(each.nbytes for each in self.empty.buffers() if not each.is_meta)

    def train_bytes(self, sets: int) -> int:
        """Return the bytes of the weights, ``sets`` of gradients, optimiser state and constants."""
        gradients = sets * sum(self.tensors[name].nbytes for name in self.trained)
        return gradients + sum(each.nbytes for each in self.tensors.values()) + self.constant_bytes

    def check(self, tensors: Tensors) -> None:
        """Raise ``WireError`` for a tensor that the block does not have."""
        for key, tensor in tensors.items():
            like = self.tensors.get(key)
            if like is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                shape = f"{tensor.dtype} {list(tensor.shape)}"
                raise WireError(f"{key[:80]!r} as {shape}, which the block does not have")

    def check_complete(self, names: Collection[str], whole: bool) -> None:
        """Raise ``WireError`` if a trainable weight is missing, or state of a weight that has
        some; with ``whole`` also if a frozen weight is missing."""
        stepped = {each.partition("/")[0] for each in names if "/" in each}
        for key in self.tensors:
            weight, of_state, _ = key.partition("/")
            required = weight in stepped if of_state else whole or key in self.trained
            if required and key not in names:
                raise WireError(f"lacks {key[:80]!r}")

    def build(self, weights: Tensors) -> nn.Module:
        """Return a block that holds ``weights``, by their names in the block. Call
        ``check_complete`` before."""
        held = dict[int, Tensor]()
        for name, each in self.empty.state_dict(keep_vars=True).items():
            own = aligned(weights[name])
            if isinstance(each, nn.Parameter):
                own = nn.Parameter(own, each.requires_grad)
            held[id(each)] = own
        return copied(self.empty, held)


@functools.lru_cache(maxsize=6)  # of this round and the next: building blocks takes a while
def block_forms(
    spec: ModelSpec, indices: range, optimizer: OptimizerSettings, dtype: torch.dtype
) -> Mapping[str, BlockForm]:
    """Return the forms of blocks by name. Weights have the ``dtype``, or the one in which they are
    kept."""
    forms = {}
    for index in indices:
        name = block_name(index)
        with WithoutValues():
            block = spec.build_block(index)
        weights = {
            f"{name}.{key}": in_dtype(each, dtype).detach()
            for key, each in block.state_dict(keep_vars=True).items()
        }
        trained = frozenset(f"{name}.{each}" for each in training_names(block))
        state = state_like(optimizer, {key: weights[key] for key in weights if key in trained})
        forms[name] = BlockForm(weights | state, trained, block)
    return forms
