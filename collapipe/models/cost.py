"""What an encoder block costs, counted on the block itself, without memory for its weights."""

import functools
import inspect
from collections.abc import Hashable, Iterable
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from collapipe.models.dropout import drawing_from
from collapipe.models.split import ModelSpec
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.text.tokenizer import Vocabulary
from collapipe.wire.compression import FLOAT32, num_bytes

_FLOAT_BITS = 32
_Shape = tuple[int, ...]
# The CPU's fused kernel, which torch's own table of FLOPs lacks.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ATTENTION = {
    _KERNEL: inspect.unwrap(sdpa_flop),
    _BACKWARD_KERNEL: inspect.unwrap(sdpa_backward_flop),
}


def measure_cost(
    spec: ModelSpec,
    tokens: int,
    batch_size: int,
    optimizer: OptimizerSettings | None = None,
) -> BlockCost:
    """Cost of the dearest block for samples of ``tokens`` tokens, in float32.

    Of a model's blocks the first and the last may differ from those between, which are alike: T5's
    first has the table that all of them need, and the last sends it no further. Planners take all
    for alike, so that each figure is the larger of the first block's and the second's.

    FLOPs are those of matrix products, attention's among them, in one forward and backward of one
    sample. Bytes are the weights, gradients and moments (AdamW's where no ``optimizer`` is given)
    of what trains, and what autograd saves, for all b samples at once: GPipe keeps them all, 1F1B
    fewer. ``spec`` must be hashable, as frozen dataclasses are.
    """
    return _dearest(cast(Hashable, spec), tokens, batch_size, optimizer)


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def _dearest(
    spec: Any, tokens: int, batch_size: int, optimizer: OptimizerSettings | None
) -> BlockCost:
    shape: _Shape = (1, tokens, spec.dim)
    costs = []
    for index in range(min(2, spec.num_blocks)):
        with torch.device("meta"):
            block = spec.build_block(index)
        with FakeTensorMode(allow_non_fake_inputs=True):  # shapes alone: nothing is computed
            shape, cost = _measure(block, shape, tokens, batch_size, optimizer)
        costs.append(astuple(cost))
    return BlockCost(*map(max, zip(*costs, strict=True)))


def _measure(
    block: nn.Module,
    shape: _Shape,
    tokens: int,
    batch_size: int,
    optimizer: OptimizerSettings | None,
) -> tuple[_Shape, BlockCost]:
    """The shape of the block's activation, and its cost; ``shape`` is what the block gets."""
    block = block.train().to_empty(device="cpu")
    hidden = torch.zeros(shape, requires_grad=True)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with (
        _counter() as forward,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        drawing_from(torch.Generator()),
    ):
        out = block(hidden, mask)
    with _counter() as backward:
        out.backward(torch.ones_like(out))
    own = [*block.parameters(), *block.buffers()]
    stash = _nbytes(saved, besides=own)
    trained = sum(weight.nbytes for weight in block.parameters() if weight.requires_grad)
    cost = BlockCost(
        forward_flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        activation_bits=float(out.numel() * _FLOAT_BITS),
        gradient_bits=float(out.numel() * _FLOAT_BITS),
        block_bytes=float(_nbytes(own) + (1 + _moments(optimizer)) * trained + batch_size * stash),
    )
    return tuple(out.shape), cost


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_ATTENTION)


def _moments(optimizer: OptimizerSettings | None) -> int:
    """Numbers that the optimiser remembers for each one that trains."""
    if optimizer is None or optimizer.name == "adamw":
        return 2
    return int(optimizer.momentum > 0)


def _nbytes(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    storages = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages[key] for key in storages.keys() - set(map(_key, besides)))


def _key(tensor: Tensor) -> int:
    """A storage's identity; one without memory has no address."""
    return int(tensor.untyped_storage()._cdata)


def upload_bits(
    spec: ModelSpec,
    vocabulary: Vocabulary,
    precision: str = FLOAT32,
    dtype: torch.dtype = torch.float32,
    with_head: bool = False,
) -> float:
    """θ^enc: what a unit uploads after a round, the weights of embedding and blocks that train, as
    ``compression.upload`` sends them; ``with_head`` also those of the head, where the unit has it.
    ``dtype`` is that in which the model computes.
    """
    return 8.0 * sum(
        num_bytes(shape, dtype if own.is_floating_point else own, precision)
        for shape, own in _uploaded(cast(Hashable, spec), vocabulary, with_head)
    )


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def _uploaded(
    spec: Any, vocabulary: Vocabulary, with_head: bool
) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shape and type of each weight that travels."""
    with torch.device("meta"):
        parts = [spec.build_embedding(vocabulary), *map(spec.build_block, range(spec.num_blocks))]
        parts += [spec.build_head(vocabulary)] if with_head else []
    return tuple((weight.shape, weight.dtype) for part in parts for weight in _travelling(part))


def _travelling(part: nn.Module) -> list[Tensor]:
    frozen = {name for name, weight in part.named_parameters() if not weight.requires_grad}
    return [weight for name, weight in part.state_dict().items() if name not in frozen]
