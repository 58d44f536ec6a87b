"""A linear law with non-negative coefficients is fitted to measured times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.devices.fitting import fit

POINTS = [(blocks * samples, float(blocks)) for blocks in (1, 2) for samples in (1, 16)]
seconds = st.floats(1e-6, 10.0)


@given(seconds, seconds | st.just(0.0))
def test_an_exact_law_is_recovered(each: float, fixed: float) -> None:
    found = fit(POINTS, [each * x + fixed * y for x, y in POINTS])
    assert found.each == pytest.approx(each, rel=1e-6)
    assert found.fixed == pytest.approx(fixed, rel=1e-6, abs=1e-6 * each)
    assert found.error < 1e-9


def test_noisy_times_give_a_close_law_and_an_error_as_large_as_the_noise() -> None:
    drawn = random.Random(0)
    times = [(0.02 * x + 0.05 * y) * drawn.uniform(0.95, 1.05) for x, y in POINTS * 8]
    found = fit(POINTS * 8, times)
    assert (found.each, found.fixed) == (
        pytest.approx(0.02, rel=0.05),
        pytest.approx(0.05, rel=0.1),
    )
    assert 0.01 < found.error < 0.05


def test_no_coefficient_is_negative() -> None:
    faster = fit(POINTS, [2.0, 1.0, 4.0, 2.0])  # a larger micro-batch took less time
    assert faster.each == 0.0 and faster.fixed > 0.0
    assert faster.error > 0.2
    steeper = fit(POINTS, [1.0, 32.0, 2.0, 64.0])  # larger micro-batches: twice the time per sample
    assert steeper.fixed == 0.0 and steeper.each > 0.0


def test_relative_errors_of_long_and_short_times_have_equal_weight() -> None:
    """An error of 1 % has the same weight at 1 byte as at 1,000,000 bytes."""
    points = [(1.0, 1.0), (1e6, 1.0), (1.0, 1.0), (1e6, 1.0)]
    found = fit(points, [0.99e-3, 0.99, 1.01e-3, 1.01])
    assert found.each == pytest.approx(1e-6, rel=0.01)
    assert found.error == pytest.approx(0.01, rel=0.01)
