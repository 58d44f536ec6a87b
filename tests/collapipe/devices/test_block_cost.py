"""The formulas for a block's FLOPs and memory agree with a real block."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from collapipe.devices.hardware import transformer_block_cost
from collapipe.models.dropout import drawing_from
from collapipe.models.transformer import EncoderBlock, TransformerSpec

TOKENS, BATCH = 48, 5
SIZES = pytest.mark.parametrize(("dim", "inner"), [(64, 256), (96, 96), (128, 640)])


@SIZES
def test_flops_match_torchs_flop_counter(dim: int, inner: int) -> None:
    block, cost = built(dim, inner), transformer_block_cost(dim, inner, TOKENS, BATCH)
    # torch counts the operations of only one attention kernel, the plain (math) one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = forward(block, 1)
    assert counter.get_total_flops() == cost.forward_flops
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == cost.backward_flops
    assert cost.activation_bits == cost.gradient_bits == 8 * output.nbytes


@SIZES
def test_block_bytes_include_parameters_and_tensors_that_autograd_keeps(
    dim: int, inner: int
) -> None:
    block, cost = built(dim, inner), transformer_block_cost(dim, inner, TOKENS, BATCH)
    of_parameters = 4 * sum(parameter.nbytes for parameter in block.parameters())
    total = of_parameters + kept_bytes(block, BATCH)
    assert cost.block_bytes == pytest.approx(total, rel=0.01)


def built(dim: int, inner: int) -> nn.Module:
    return EncoderBlock(TransformerSpec(dim=dim, num_heads=4, feed_forward_dim=inner))


def forward(block: nn.Module, samples: int) -> Tensor:
    dim = next(block.parameters()).shape[0]
    hidden = torch.randn(samples, TOKENS, dim, requires_grad=True)
    mask = torch.ones(samples, TOKENS, dtype=torch.bool)
    with drawing_from(torch.Generator().manual_seed(0)):
        output: Tensor = block(hidden, mask)
    return output


def kept_bytes(block: nn.Module, samples: int) -> int:
    """Bytes that autograd keeps for the backward pass, without the parameters."""
    kept: list[Tensor] = []  # kept alive until counted, so that no address is reused

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward(block, samples)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    storages = [tensor.untyped_storage() for tensor in kept]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert output.requires_grad
    return sum(size for address, size in sizes.items() if address not in weights)
