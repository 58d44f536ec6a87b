"""Dropout draws its masks from the given generator only."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from collapipe.models.dropout import Dropout, DropoutKey, ForeignDropout, drawing_from

KEY = DropoutKey(seed=1, unit=2, step=3)


def dropped(x: torch.Tensor, key: DropoutKey = KEY, part: str = "head", m: int = 0) -> torch.Tensor:
    """Apply dropout with probability 0.3 once."""
    with drawing_from(key.generator(part, m)):
        return Dropout(0.3)(x)  # type: ignore[no-any-return]


def test_training_without_a_generator_is_an_error() -> None:
    """Masks from torch's global generator would not be reproducible."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="drawing_from"):
        Dropout(0.3)(x)
    with drawing_from(KEY.generator("head", 0)):
        Dropout(0.3)(x)
    with pytest.raises(RuntimeError, match="drawing_from"):
        Dropout(0.3)(x)


def test_evaluation_and_probability_0_return_the_input() -> None:
    """They need no generator."""
    x = torch.randn(5)
    assert Dropout(0.3).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_a_mask_depends_only_on_its_key() -> None:
    """Torch's global generator and earlier draws do not change a mask; each field of the key
    does."""
    x = torch.ones(64)
    torch.manual_seed(1)
    first = dropped(x)
    dropped(x, part="blocks.0")
    torch.manual_seed(2)
    assert torch.equal(dropped(x), first)
    others = [
        dropped(x, part="blocks.1"),
        dropped(x, m=1),
        dropped(x, DropoutKey(seed=2, unit=2, step=3)),
        dropped(x, DropoutKey(seed=1, unit=3, step=3)),
        dropped(x, DropoutKey(seed=1, unit=2, step=4)),
        dropped(x, DropoutKey(seed=1, unit=3, step=2)),
    ]
    assert len({tuple(mask.tolist()) for mask in (first, *others)}) == 1 + len(others)


def test_the_global_generator_of_torch_is_not_used() -> None:
    """A user's random numbers do not depend on training between two draws."""
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    dropped(torch.ones(64))
    assert torch.equal(torch.rand(3), expected)


def test_one_generator_gives_different_masks_in_succession() -> None:
    """Two layers of a part do not share a mask."""
    with drawing_from(KEY.generator("head", 0)):
        first, second = Dropout(0.3)(torch.ones(64)), Dropout(0.3)(torch.ones(64))
    assert not torch.equal(first, second)


def test_the_outer_generator_is_restored_after_an_inner_one() -> None:
    """``drawing_from`` can be nested, and restores the generator after an error too."""
    x = torch.ones(64)
    with drawing_from(KEY.generator("head", 0)):
        with pytest.raises(KeyError), drawing_from(KEY.generator("blocks.0", 0)):
            raise KeyError
        assert torch.equal(Dropout(0.3)(x), dropped(x))


def test_the_mean_is_kept() -> None:
    """Kept elements are scaled by 1 / (1 − p); 3 of 10 are zero, within 5 σ."""
    count = 100_000
    y = dropped(torch.ones(count, dtype=torch.float64))
    assert set(y.tolist()) == {0.0, 1 / 0.7}
    assert abs((y == 0).double().mean().item() - 0.3) < 5 * (0.3 * 0.7 / count) ** 0.5


def test_the_gradient_has_the_mask_and_scale_of_the_values() -> None:
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    y = dropped(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad * x, y)


def test_foreign_dropout_draws_as_ours_does() -> None:
    """torch's module and function draw the same mask, only in training, and not from torch's
    generator."""
    x, before = torch.ones(64), torch.get_rng_state()
    with drawing_from(KEY.generator("head", 0)), ForeignDropout():
        assert torch.equal(nn.Dropout(0.3)(x), dropped(x))
    with drawing_from(KEY.generator("head", 0)), ForeignDropout():
        assert torch.equal(functional.dropout(x, 0.3), dropped(x))
    with ForeignDropout():
        assert torch.equal(nn.Dropout(0.3).eval()(x), x)
        with pytest.raises(RuntimeError, match="drawing_from"):
            nn.Dropout(0.3)(x)
    assert torch.equal(torch.get_rng_state(), before)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "chosen": {"attn_mask": torch.rand(2, 1, 5, 5) < 0.7},
    "added": {"attn_mask": torch.randn(2, 4, 5, 5)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_dropout_has_the_bits_of_plain_operations(mask: str) -> None:
    """Groups of queries share keys and values."""
    query, key, value = (torch.randn(2, heads, 5, 6) for heads in (4, 2, 2))
    options = MASKS[mask]
    with ForeignDropout(), drawing_from(KEY.generator("head", 0)):
        found = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.3, enable_gqa=True, **options
        )
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 6**-0.5
    if mask != "none":
        seen = options.get("attn_mask", torch.ones(5, 5, dtype=torch.bool).tril())
        lowest = torch.finfo(torch.float32).min
        scores = scores + (seen if mask == "added" else torch.where(seen, 0.0, lowest))
    with drawing_from(KEY.generator("head", 0)):
        expected = Dropout(0.3)(scores.softmax(-1)) @ value.repeat_interleave(2, 1)
    assert torch.equal(found, expected)


def test_attention_without_dropout_uses_the_fused_kernel() -> None:
    query, key, value = (torch.randn(2, 4, 5, 6, requires_grad=True) for _ in range(3))
    with ForeignDropout():
        found = functional.scaled_dot_product_attention(query, key, value)
    assert found.grad_fn is not None
    assert "FlashAttention" in found.grad_fn.name()
