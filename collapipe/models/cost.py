"""What an encoder block costs, counted on the block itself."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from collapipe.models.dropout import drawing_from
from collapipe.models.split import ModelSpec, build_empty
from collapipe.state import BlockCost
from collapipe.tasks.tokenizer import Vocabulary

_FLOAT_BITS = 32
_COPIES = 4  # weights, gradients, and AdamW's two moments


def measure_cost(spec: ModelSpec, tokens: int, batch_size: int) -> BlockCost:
    """Cost of the first block for samples of ``tokens`` tokens, in float32 and with AdamW.

    FLOPs are those of the linear layers, counted in one forward and backward of one sample;
    attention's own products, a few per cent at such lengths, are not where torch fuses them. What
    is kept for backward is what autograd saves, for all b samples at once (GPipe).
    """
    block = build_empty(lambda: spec.build_block(0), _zeros(lambda: spec.build_block(0)))
    hidden = torch.zeros(1, tokens, spec.dim, requires_grad=True)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    with (
        FlopCounterMode(display=False) as forward,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        drawing_from(torch.Generator()),
    ):
        out = block(hidden, mask)
    with FlopCounterMode(display=False) as backward:
        out.backward(torch.ones_like(out))
    stash = sum(size for storage, size in kept.items() if storage not in own)
    weights = sum(parameter.numel() * 4 for parameter in block.parameters())
    bits = float(tokens * spec.dim * _FLOAT_BITS)
    return BlockCost(
        forward_flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        activation_bits=bits,
        gradient_bits=bits,
        block_bytes=float(_COPIES * weights + batch_size * stash),
    )


def upload_bits(spec: ModelSpec, vocabulary: Vocabulary, with_head: bool = False) -> float:
    """θ^enc: what a unit uploads after a round, the weights of embedding and blocks in float32;
    ``with_head`` also those of the head, where the unit has it."""
    with torch.device("meta"):
        parts = [spec.build_embedding(vocabulary), *map(spec.build_block, range(spec.num_blocks))]
        parts += [spec.build_head(vocabulary)] if with_head else []
    return float(_FLOAT_BITS * sum(map(_numbers, parts)))


def _zeros(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Weights for a cost, which does not depend on them: nothing is drawn, nothing downloaded."""
    with torch.device("meta"):
        return {
            name: torch.zeros(weight.shape, dtype=weight.dtype, device="cpu")
            for name, weight in build().state_dict().items()
        }


def _numbers(part: nn.Module) -> int:
    return sum(tensor.numel() for tensor in part.state_dict().values())
