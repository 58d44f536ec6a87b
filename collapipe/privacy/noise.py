"""Gaussian noise from an unrepeatable source, or from a seed if a run must be repeatable."""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

_BITS = 52  # the midpoint of each step is then a float64 below 1; 53 bits could give infinity


class GaussianNoise:
    """Independent normal numbers of mean 0 and variance 1, as float64.

    Without a ``seed`` they are normal quantiles of numbers from the operating system's
    cryptographic source, within ±8.2. With a seed they come from torch's Mersenne Twister, and
    anyone who knows the seed can remove them.

    Floating-point numbers are a grid, which an adversary who sees the exact sum may exploit
    (Mironov 2012). The only countermeasure is that the sum is computed in float64 and published in
    float32.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Draw a float64 tensor of this shape."""
        if self._generator is not None:
            return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        drawn = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64) >> (64 - _BITS)
        return torch.from_numpy(ndtri((drawn + 0.5) * 2.0**-_BITS)).reshape(tuple(shape))
