"""Seeded noise and the system's noise are normal. Tests fail by chance once in 1e9 runs."""

import os

import pytest
import torch
from scipy import stats

from collapipe.privacy.noise import GaussianNoise

NUMBERS = 20_000


def test_seeded_noise_and_the_systems_noise_are_normal() -> None:
    for seed in (None, 5):
        drawn = GaussianNoise(seed).draw((NUMBERS // 100, 100))
        assert drawn.dtype == torch.float64 and drawn.shape == (NUMBERS // 100, 100)
        assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-9


def test_a_seed_repeats_the_noise_and_the_systems_source_does_not() -> None:
    first, again = (GaussianNoise(5).draw((9,)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(GaussianNoise(None).draw((9,)), GaussianNoise(None).draw((9,)))


def test_a_second_draw_returns_other_values() -> None:
    source = GaussianNoise(5)
    assert not torch.equal(source.draw((9,)), source.draw((9,)))


def test_a_scalar_can_be_drawn() -> None:
    assert all(GaussianNoise(seed).draw(()).shape == () for seed in (None, 5))


@pytest.mark.parametrize(("byte", "sign"), [(b"\x00", -1), (b"\xff", 1)])
def test_the_smallest_and_largest_values_of_the_systems_noise_are_finite(
    monkeypatch: pytest.MonkeyPatch, byte: bytes, sign: int
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: byte * count)
    assert GaussianNoise(None).draw((2,)).tolist() == pytest.approx([sign * 8.21] * 2, abs=0.01)
