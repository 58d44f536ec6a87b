"""Integer noise follows the discrete Gaussian distribution and repeats only with a seed."""

import numpy as np
import pytest
from scipy.stats import chisquare

from collapipe.privacy.noise import DiscreteGaussian

_MANY = 200_000


@pytest.mark.parametrize("deviation", [0.5, 1.0, 4.3, 30.0])
def test_integers_have_the_frequencies_of_the_discrete_gaussian(deviation: float) -> None:
    drawn = DiscreteGaussian(deviation, seed=1).draw(_MANY)
    reach = int(4 * deviation) + 1
    numbers = np.arange(-reach, reach + 1)
    weights = np.exp(-(numbers**2) / (2 * deviation**2))
    expected = _MANY * weights / weights.sum()
    common = expected > 20
    counts = np.array([(drawn == number).sum() for number in numbers[common]])
    rest = _MANY - counts.sum(), _MANY - expected[common].sum()
    found = chisquare([*counts, rest[0]], [*expected[common], rest[1]])
    assert found.pvalue > 1e-3


def test_rare_large_values_are_drawn_too() -> None:
    """6.8 of a million values lie more than 4.5 standard deviations from 0."""
    drawn = DiscreteGaussian(100.0, seed=3).draw(2_000_000)
    assert 2 <= (np.abs(drawn) > 450).sum() <= 30


def test_only_the_same_seed_repeats_the_noise() -> None:
    def drawn(seed: int | None) -> list[int]:
        return DiscreteGaussian(1000.0, seed).draw(50).tolist()

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_drawing_zero_values_returns_an_empty_array() -> None:
    assert DiscreteGaussian(10.0, None).draw(0).shape == (0,)
