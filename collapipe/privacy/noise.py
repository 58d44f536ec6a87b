"""Noise from an unrepeatable source, or from a seed if a run must be repeatable.

The server adds Gaussian numbers to a sum; units add whole numbers to their updates before masking.
Those have a discrete Gaussian distribution, P(x) ∝ exp(−x²/2σ²) over the integers, by rejection
sampling on whole arrays (Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential
Privacy", algorithms 1 to 3). The paper and OpenDP draw with exact fractions, which takes 24 µs per
number, or half a minute for a million. Here probabilities are float64, with a relative error of
2⁻⁵². A number needs some 50 of them, so a million numbers add less than 1e-8 to ε.

A sum of k such numbers has almost the same distribution: see ``LEAST_DEVIATION``.
"""

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

_BITS = 52  # the midpoint of each step is then a float64 below 1; 53 bits could give infinity
LEAST_DEVIATION = 4.0
"""Least σ of a unit. The sum of k discrete Gaussians of d values is as private as one with k
times the variance, apart from τ = 10·Σ_{j<k} exp(−2π²σ²·j/(j + 1)) (Kairouz, Liu and Steinke 2021,
theorem 1). d·τ is added to 1/z²: with this σ it is below d·k·1e-66, which is negligible."""
_CHUNK = 2**20
_Floats = NDArray[np.float64]
_Whole = NDArray[np.int64]
_Bools = NDArray[np.bool_]


class GaussianNoise:
    """Independent normal numbers of mean 0 and variance 1, as float64.

    Without a ``seed`` they are normal quantiles of numbers from the operating system's
    cryptographic source, within ±8.2. With a seed they come from torch's Mersenne Twister, and
    anyone who knows the seed can remove them.

    Floating-point numbers are a grid, which an adversary who sees the exact sum may exploit
    (Mironov 2012). The only countermeasure is that the sum is computed in float64 and published in
    float32. It does not help with ``pipeline.dtype=float64``.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Draw a float64 tensor of this shape."""
        if self._generator is not None:
            return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        drawn = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64) >> (64 - _BITS)
        return torch.from_numpy(ndtri((drawn + 0.5) * 2.0**-_BITS)).reshape(tuple(shape))


class DiscreteGaussian:
    """Independent whole numbers of standard deviation σ = ``deviation``.

    Without a ``seed`` random bits come from the operating system's cryptographic source. With a
    seed the numbers can be repeated, and anyone who knows the seed can remove the noise.
    """

    def __init__(self, deviation: float, seed: int | None) -> None:
        self._variance, self._scale = deviation**2, int(deviation) + 1
        self._seeded = None if seed is None else np.random.default_rng(seed)

    def draw(self, count: int) -> _Whole:
        """Draw ``count`` numbers, int64 [count]."""
        chunks = (min(_CHUNK, count - first) for first in range(0, count, _CHUNK))
        return np.concatenate([np.zeros(0, np.int64), *map(self._drawn, chunks)])

    def _drawn(self, count: int) -> _Whole:
        return _accepted(count, self._proposed)

    def _proposed(self, count: int) -> tuple[_Whole, _Bools]:
        laplace = _accepted(count, self._laplace)
        away = np.abs(laplace) - self._variance / self._scale
        return laplace, self._with_probability(away**2 / (2 * self._variance))

    def _laplace(self, count: int) -> tuple[_Whole, _Bools]:
        """Propose numbers from P(x) ∝ exp(−|x|/t) with the scale t."""
        within = _accepted(count, self._below_multiple) % self._scale
        kept = self._with_probability(within / self._scale)
        sizes = within + self._scale * self._geometric(count)
        negative = self._uniform(count) < 0.5
        kept &= ~(negative & (sizes == 0))  # else 0 would be twice as likely
        return np.where(negative, -sizes, sizes), kept

    def _below_multiple(self, count: int) -> tuple[_Whole, _Bools]:
        """Propose uniform numbers below the largest multiple of t."""
        found = self._bits(count) >> np.uint64(1)
        return found.astype(np.int64), found < 2**63 - 2**63 % self._scale

    def _geometric(self, count: int) -> _Whole:
        """Draw from P(x) ∝ exp(−x), x ≥ 0."""
        found = np.zeros(count, np.int64)
        open_ = np.arange(count)
        while (open_ := open_[self._with_probability(np.ones(open_.size))]).size:
            found[open_] += 1
        return found

    def _with_probability(self, exponents: _Floats) -> _Bools:
        """Draw True with probability exp(−x) for each x ≥ 0.

        One draw for each whole 1 in x and one for the rest keep every probability large enough for
        float64.
        """
        kept, left = np.ones(exponents.size, np.bool_), exponents.copy()
        while (open_ := np.flatnonzero(kept & (left > 1))).size:
            kept[open_] = self._uniform(open_.size) < np.exp(-1.0)
            left[open_] -= 1
        open_ = np.flatnonzero(kept)
        kept[open_] = self._uniform(open_.size) < np.exp(-left[open_])
        return kept

    def _uniform(self, count: int) -> _Floats:
        """Draw uniform multiples of 2⁻⁵³ in [0, 1)."""
        return (self._bits(count) >> np.uint64(11)) * np.float64(2.0**-53)

    def _bits(self, count: int) -> NDArray[np.uint64]:
        if self._seeded is not None:
            return self._seeded.integers(0, 2**64, count, np.uint64)
        return np.frombuffer(os.urandom(8 * count), np.uint64).copy()


def _accepted(count: int, propose: Callable[[int], tuple[_Whole, _Bools]]) -> _Whole:
    """Draw ``count`` numbers, and those that are not accepted again."""
    found, open_ = np.zeros(count, np.int64), np.arange(count)
    while open_.size:
        proposed, accepted = propose(open_.size)
        found[open_[accepted]] = proposed[accepted]
        open_ = open_[~accepted]
    return found
