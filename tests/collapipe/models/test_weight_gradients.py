"""A backward in two halves gives the bits of one, each half does its own work, and no more."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from collapipe.models.cost import flop_counter
from collapipe.models.weight_gradients import SplitBackward

Call = Callable[[nn.Module, Tensor], Tensor]
SHAPE = (3, 2, 5, 8)  # three micro-batches


def chain(module: nn.Module, x: Tensor) -> Tensor:
    """Ordinary layers."""
    return module(torch.tanh(x)) + x


def again_and_again(module: nn.Module, x: Tensor) -> Tensor:
    """One layer's weights, several times, and once by themselves."""
    for _ in range(3):
        x = chain(module, x)
    return x * next(module.parameters()).sum()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))


CASES = {
    "layers": (layers, chain),
    "shared": (lambda: nn.Linear(8, 8), again_and_again),
    "made of others": (lambda: weight_norm(nn.Linear(8, 8)), chain),
    "partly frozen": (lambda: frozen(layers()), chain),
    "unused": (lambda: nn.ModuleList([nn.Linear(8, 8)]), lambda _, x: torch.tanh(x)),
}


def frozen(module: nn.Module) -> nn.Module:
    next(module.parameters()).requires_grad_(False)
    return module


def gradients(make: Callable[[], nn.Module], call: Call, split: bool) -> list[Tensor | None]:
    """Of three micro-batches' inputs, and of the weights after all of them; weights come last."""
    torch.manual_seed(3)
    module, halves = make(), list[SplitBackward]()
    inputs = [each.requires_grad_() for each in torch.randn(SHAPE)]
    for each, gradient in zip(inputs, torch.randn(SHAPE), strict=True):
        out = call(module, each)
        if split:
            halves.append(SplitBackward(out, gradient, each))
        else:
            out.backward(gradient)
    for half in halves:
        half.accumulate()
    return [each.grad for each in (*inputs, *module.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_backward(name: str) -> None:
    make, call = CASES[name]
    whole, halves = (gradients(make, call, split) for split in (False, True))
    for one, other in zip(whole, halves, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other)
            assert one.stride() == other.stride()  # in whose order norms are summed


def test_each_half_does_its_own_work_once() -> None:
    """A linear layer's products: as many for the inputs as for the weights."""
    module, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(5, 8)
    out = module(inputs.requires_grad_())
    with flop_counter() as first:
        half = SplitBackward(out, torch.ones_like(out), inputs)
    assert inputs.grad is not None
    assert [weight.grad for weight in module.parameters()] == [None] * 4
    assert sum(each.nbytes for each in half.kept) == 2 * 5 * 8 * 4  # of each layer's output
    with flop_counter() as second:
        half.accumulate()
    assert first.get_total_flops() == second.get_total_flops() == 2 * 2 * 5 * 8 * 8
