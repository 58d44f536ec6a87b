"""Means of quantised changes equal means of the changes, up to the documented error."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sections import privacy_settings

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.privacy.noise import LEAST_DEVIATION
from collapipe.secure_aggregation.quantising import _CHUNK, LEVELS, Quantiser

BOUND = 0.5


def vectors(units: int, size: int, norms: float, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal(size) for _ in range(units)]
    return [(each * norms / np.linalg.norm(each)).astype(np.float32) for each in drawn]


def summed(quantiser: Quantiser, changes: list[np.ndarray]) -> np.ndarray:
    words = [quantiser.quantise(x, np.random.default_rng(n)) for n, x in enumerate(changes)]
    return np.sum([quantiser.unpack(quantiser.pack(each)) for each in words], axis=0).astype(
        words[0].dtype
    )


def clipped(change: np.ndarray) -> np.ndarray:
    return change * min(1.0, BOUND / np.linalg.norm(change))


@given(
    precision=st.sampled_from(sorted(LEVELS)),
    units=st.integers(1, 6),
    size=st.integers(1, 300),
    norms=st.sampled_from([0.0, 1e-9, 0.3, BOUND, 7.0, 1e30]),
    alone=st.booleans(),
)
def test_the_error_of_the_mean_is_within_the_bound(
    precision: str, units: int, size: int, norms: float, alone: bool
) -> None:
    changes = vectors(units, size, norms)
    if alone:  # the whole norm in one value, equal for all units: the largest sum
        changes = [np.where(np.arange(size) == 0, np.float32(norms), np.float32(0))] * units
    quantiser = Quantiser(size, BOUND, LEVELS[precision], units)
    mean = quantiser.restored(summed(quantiser, changes), units) / units
    if norms:
        expected = np.mean([clipped(each.astype(np.float64)) for each in changes], axis=0)
    else:
        expected = np.zeros(size)
    error = np.linalg.norm(mean - expected)
    assert error <= 2 * BOUND / (quantiser.levels + 1) * (1 + 1e-6)


@pytest.mark.parametrize("precision", sorted(LEVELS))
def test_the_error_is_random_and_has_the_documented_size(precision: str) -> None:
    units, size = 10, 20_000
    quantiser = Quantiser(size, BOUND, LEVELS[precision], units)
    changes = vectors(units, size, 0.8 * BOUND)
    error = quantiser.restored(summed(quantiser, changes), units) / units - np.mean(changes, axis=0)
    largest = BOUND / (2 * (quantiser.levels + 1) * math.sqrt(units))
    assert 0.5 * largest < np.linalg.norm(error) <= 1.01 * largest
    # no bias: the errors' mean is as small as for independent errors
    assert abs(error.mean()) < 5 * largest / size


def test_changes_smaller_than_a_step_are_not_lost() -> None:
    """Rounding to the nearest step would turn a change of 0.3 steps in each value into 0."""
    quantiser = Quantiser(20_000, BOUND, LEVELS["int4"], 1)
    change = np.full(20_000, 0.3 * quantiser.step)
    words = quantiser.quantise(change, np.random.default_rng(0))
    assert quantiser.restored(words, 1).mean() == pytest.approx(change[0], rel=0.05)


@pytest.mark.parametrize("precision", sorted(LEVELS))
def test_a_quantised_change_has_no_larger_norm_than_the_bound(precision: str) -> None:
    for size in (1, 7, 5000):
        quantiser = Quantiser(size, BOUND, LEVELS[precision], 1)
        for seed, change in enumerate(vectors(3, size, 40.0)):
            words = quantiser.quantise(change, np.random.default_rng(seed))
            assert np.linalg.norm(quantiser.restored(words, 1)) <= BOUND * (1 + 1e-9)


def test_words_over_32_bits_in_several_chunks_are_packed_without_loss() -> None:
    quantiser = Quantiser(_CHUNK + 5, BOUND, LEVELS["float32"], 100)
    assert quantiser.bits > 32
    words = np.random.default_rng(0).integers(0, 2**64, _CHUNK + 5, dtype=np.uint64)
    packed = quantiser.pack(words)
    assert len(packed) == quantiser.num_bytes
    assert np.array_equal(quantiser.unpack(packed), words & np.uint64(2**quantiser.bits - 1))


NOISY = privacy_settings(
    clip_norm=BOUND, noise_multiplier=2.0, noise_by="units", secure_aggregation=True
)


@pytest.mark.parametrize("precision", sorted(LEVELS))
@pytest.mark.parametrize("finished", [7, 10])
def test_the_units_noise_adds_up_to_the_noise_of_the_sum(precision: str, finished: int) -> None:
    """The noise of six of ten units is z·C. Six is one fewer than the seven that must finish."""
    size = 4000
    quantiser = Quantiser.of(precision, NOISY, size, BOUND, 10)  # type: ignore[arg-type]
    changes = vectors(finished, size, 0.5 * BOUND)
    words = summed(quantiser, changes)
    error = quantiser.restored(words, finished) - np.sum(changes, axis=0, dtype=np.float64)
    expected = 2.0 * BOUND * math.sqrt(finished / 6)
    assert error.std() == pytest.approx(expected, rel=0.06)
    assert abs(error.mean()) < 4 * expected / math.sqrt(size)
    with pytest.raises(WireError, match="norm"):
        quantiser.restored(words + words.dtype.type(2**quantiser.bits // 3), finished)


def test_noise_too_small_for_the_precision_is_refused() -> None:
    faint = replace(NOISY, noise_multiplier=0.01)
    with pytest.raises(WireError, match="choose a finer"):
        Quantiser.of("int4", faint, 100, BOUND, 10)
    assert Quantiser.of("float32", faint, 100, BOUND, 10).noise > LEAST_DEVIATION


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_change_that_is_not_finite_is_refused(value: float) -> None:
    change = np.array([0.1, value], np.float32)
    with pytest.raises(NonFiniteLossError):
        Quantiser(2, BOUND, 127, 3).quantise(change, np.random.default_rng(0))


def test_a_sum_that_clipped_updates_cannot_have_is_refused() -> None:
    quantiser = Quantiser(100, BOUND, 127, 3)
    changes = vectors(2, 100, BOUND)
    total = summed(quantiser, changes)
    total += np.random.default_rng(0).integers(0, 2**32, 100, dtype=np.uint32)
    with pytest.raises(WireError):
        quantiser.restored(total, 3)


def test_a_sum_that_is_slightly_too_long_for_its_units_is_refused() -> None:
    """The sum of two equal updates of the largest norm is refused as the sum of one unit."""
    quantiser = Quantiser(100, BOUND, LEVELS["float32"], 3)
    (change,) = vectors(1, 100, BOUND)
    total = summed(quantiser, [change, change])
    assert np.linalg.norm(quantiser.restored(total, 2)) > 1.9 * BOUND
    with pytest.raises(WireError, match="not clipped"):
        quantiser.restored(total, 1)
