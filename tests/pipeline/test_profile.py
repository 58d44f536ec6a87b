"""The law that is fitted to chunk times."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import nnls

from collapipe.state import AffineLaw
from pipeline.profile import ChunkTime, Moments, add_up, fit

MODELLED = AffineLaw(9.0, 9.0, 0.3, 0.2)


def chunks(u: float, v: float, noise: float = 0.0) -> list[ChunkTime]:
    rng = np.random.default_rng(0)
    return [
        ChunkTime("a", blocks, samples, blocks * (u * samples + v) + noise * abs(rng.normal()))
        for blocks in (1, 2, 5)
        for samples in (1, 3, 4, 16)
    ]


def fitted(times: list[ChunkTime]) -> tuple[float, float, float]:
    measured = fit(add_up({}, times)["a"], MODELLED)
    assert (measured.law.w, measured.law.ell) == (0.3, 0.2)
    assert measured.chunks == len(times)
    return measured.law.u, measured.law.v, measured.residual_s


@pytest.mark.parametrize(("u", "v"), [(0.01, 0.002), (0.0, 0.5), (0.3, 0.0)])
def test_a_law_is_found_again(u: float, v: float) -> None:
    assert_allclose(fitted(chunks(u, v)), (u, v, 0), atol=1e-7)


def test_what_takes_no_time_is_0_whatever_rounding_leaves() -> None:
    """A law holds no figures between 0 and 1e-18: times without noise ended there often."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        u, v = rng.permutation([10 ** rng.uniform(-12, 2), 0.0])
        times = [
            ChunkTime("a", int(blocks), int(samples), float(blocks * (u * samples + v)))
            for blocks, samples in rng.integers(1, 9, (6, 2))
        ]
        found_u, found_v, _ = fitted(times)
        assert found_u == 0 or found_u >= 1e-18
        assert found_v == 0 or found_v >= 1e-18


def test_it_is_the_least_squares_over_all_chunks() -> None:
    times = chunks(0.01, 0.0, noise=0.05)
    rows = np.array([[t.blocks * t.samples, t.blocks] for t in times], dtype=float)
    expected, distance = nnls(rows, np.array([t.seconds for t in times]))
    u, v, residual_s = fitted(times)
    assert_allclose((u, v), expected, rtol=1e-6)
    assert residual_s == pytest.approx(distance / np.sqrt(len(times)))


def test_one_size_gives_the_time_of_that_size() -> None:
    times = [ChunkTime("a", blocks, 4, blocks * 0.25) for blocks in (1, 2, 2, 3)]
    u, v, residual_s = fitted(times)
    assert u * 4 + v == pytest.approx(0.25)
    assert residual_s == pytest.approx(0, abs=1e-7)


def test_sums_of_rounds_are_the_sum_of_all() -> None:
    times = chunks(0.1, 0.2)
    assert add_up(add_up({}, times[:5]), times[5:]) == add_up({}, times)
    assert add_up({"b": Moments()}, [])["b"].count == 0
