"""Weights quantised to 8 or 4 bits, in blocks of 64 with a scale each."""

import pytest
import torch
from narrow import kept, rounded
from torch import nn

from collapipe.models.weights.kept import compute_dtype
from collapipe.models.weights.quantised import _NF4, quantise, restore


@pytest.mark.parametrize(("how", "gap"), [("int8", 1 / 127), ("nf4", 1 - 0.6961928)])
@pytest.mark.parametrize("shape", [(8, 64), (3, 70), (1, 1)])
def test_the_error_of_a_weight_is_at_most_half_a_quantisation_step(
    how: str, gap: float, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[0, :1] = 0.0
    codes, scales = quantise(weight, how)
    found = restore(codes, scales)[: weight.numel()].view(shape)
    whole = -(-weight.numel() // 64) * 64
    assert (codes.nbytes, scales.numel()) == (whole if how == "int8" else whole // 2, whole // 64)
    blocks = torch.nn.functional.pad(weight.flatten(), (0, whole - weight.numel())).view(-1, 64)
    assert torch.equal(scales, blocks.abs().amax(1))
    off = (found - weight).abs().flatten()
    assert bool((off <= scales.repeat_interleave(64)[: len(off)] * (gap / 2 + 1e-6)).all())
    assert found[0, 0] == 0.0


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_restored_weights_quantise_to_the_same_codes(how: str) -> None:
    codes, scales = quantise(torch.randn(4, 64), how)
    again, same = quantise(restore(codes, scales), how)
    assert torch.equal(again, codes)
    torch.testing.assert_close(same, scales)


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """As in the paper: 8 quantiles of the negative half and 9 of the positive half, scaled to 1."""
    normal, offset = torch.distributions.Normal(0.0, 1.0), 0.9677083
    positive = normal.icdf(torch.linspace(offset, 0.5, 9))[:-1]
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8))[:-1]
    values = torch.cat((negative, torch.zeros(1), positive.flip(0))) / positive[0]
    torch.testing.assert_close(torch.from_numpy(_NF4), values, rtol=0, atol=1e-5)


def test_only_linear_layers_except_the_output_layer_are_quantised() -> None:
    part = nn.ModuleDict({"embed": nn.Embedding(9, 8), "proj": nn.Linear(8, 64)})
    part["lm_head"] = nn.Linear(8, 9)
    own = kept(part.requires_grad_(False), quantization="nf4")
    dtypes = {name: each.dtype for name, each in own.state_dict().items()}
    assert dtypes.pop("proj.weight") == torch.uint8
    assert dtypes.pop("proj.weight_scale") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert {each.shape for each in rounded(part, quantization="nf4").parameters()} == {
        each.shape for each in part.parameters()
    }


def test_quantised_layers_compute_in_float64_with_the_same_weights() -> None:
    layer, hidden = nn.Linear(6, 5).requires_grad_(False), torch.randn(2, 6, dtype=torch.float64)
    own = kept(layer, "float32", "float64", "nf4").double()
    assert compute_dtype(own) == torch.float64
    assert torch.equal(own(hidden), rounded(layer, "float32", quantization="nf4").double()(hidden))
