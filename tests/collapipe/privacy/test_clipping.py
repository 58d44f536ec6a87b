"""A clipped update is no longer than the norm; shorter updates are unchanged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.privacy.clipping import add_clipped_update, update_norm
from collapipe.tensors import Tensors

VALUES = st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=4, max_size=4)
NORM = st.floats(1e-6, 1e6)


def model(values: list[float]) -> Tensors:
    """Two trainable tensors and a buffer that counts steps."""
    first, second = torch.tensor(values).split(2)
    return {"a.weight": first, "b.weight": second.reshape(1, 2), "b.steps": torch.tensor(3)}


def clipped(trained: Tensors, sent: Tensors, most: float) -> Tensors:
    """The clipped change, added to zeros."""
    total = {name: torch.zeros(sent[name].shape).double() for name in ("a.weight", "b.weight")}
    assert add_clipped_update(total, trained, sent, most) == update_norm(trained, sent)
    return total


def norm(change: Tensors) -> float:
    return float(torch.cat([each.reshape(-1) for each in change.values()]).norm())


@given(VALUES, VALUES, NORM)
def test_a_clipped_update_is_no_longer_than_the_norm(
    trained: list[float], sent: list[float], most: float
) -> None:
    assert norm(clipped(model(trained), model(sent), most)) <= most * (1 + 1e-12)


@given(VALUES, VALUES, NORM)
def test_clipping_keeps_the_direction_of_an_update(
    trained: list[float], sent: list[float], most: float
) -> None:
    whole = clipped(model(trained), model(sent), float("inf"))
    found, length = clipped(model(trained), model(sent), most), norm(whole)
    for name, change in whole.items():
        expected = change if length <= most else change * (most / length)
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=0)


def test_large_updates_add_up() -> None:
    """Tensors are read in chunks; the last chunk is shorter than the others."""
    torch.manual_seed(0)
    sent, *models = ({"weight": torch.randn(70_001, 3)} for _ in range(3))
    total = {"weight": torch.zeros(70_001, 3).double()}
    lengths = [add_clipped_update(total, each, sent, 1.0) for each in models]
    changes = [each["weight"].double() - sent["weight"].double() for each in models]
    assert lengths == pytest.approx([float(change.norm()) for change in changes], rel=1e-12)
    expected = sum(change / change.norm() for change in changes)
    torch.testing.assert_close(total["weight"], expected, rtol=1e-12, atol=1e-18)


def test_a_zero_update_stays_zero() -> None:
    same = model([1.0, 2.0, 3.0, 4.0])
    assert not any(change.any() for change in clipped(same, same, 1.0).values())


def test_integer_tensors_do_not_count_in_the_norm() -> None:
    trained = {**model([0.0] * 4), "b.steps": torch.tensor(10**9)}
    assert update_norm(trained, model([0.0] * 4)) == 0


def test_a_norm_beyond_single_precision_is_finite() -> None:
    far = model([3e38, -3e38, 3e38, 3e38])
    assert update_norm(far, model([0.0] * 4)) == pytest.approx(6e38)
