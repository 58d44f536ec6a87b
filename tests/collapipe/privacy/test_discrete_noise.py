"""Noise in whole numbers has the probabilities that it should, and repeats only with a seed."""

import numpy as np
import pytest
from scipy.stats import chisquare

from collapipe.privacy.noise import DiscreteGaussian

_MANY = 200_000


@pytest.mark.parametrize("deviation", [0.5, 1.0, 4.3, 30.0])
def test_each_number_comes_as_often_as_it_should(deviation: float) -> None:
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


def test_the_least_likely_ones_come_too() -> None:
    """More than 4.5 deviations away: 6.8 of a million."""
    drawn = DiscreteGaussian(100.0, seed=3).draw(2_000_000)
    assert 2 <= (np.abs(drawn) > 450).sum() <= 30


def test_a_seed_repeats_it_and_nothing_else_does() -> None:
    def drawn(seed: int | None) -> list[int]:
        return DiscreteGaussian(1000.0, seed).draw(50).tolist()

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_there_may_be_none() -> None:
    assert DiscreteGaussian(10.0, None).draw(0).shape == (0,)
