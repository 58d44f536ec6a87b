"""Gaussian noise of a source that nobody can repeat, or of a seed where a run is to be repeated."""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

_BITS = 52  # so that the middle of each step is a float64 below 1; of 53 the last would be infinite


class GaussianNoise:
    """Independent normal numbers of mean 0 and variance 1, as float64.

    Without a ``seed`` they are quantiles of numbers of the operating system's cryptographic source;
    the least and the most that come are ∓8.2. With one, those of torch's Mersenne Twister, which
    whoever knows the seed can take away again. Real numbers of a computer are a grid, which an
    adversary who sees the exact sum may use (Mironov 2012); nothing is done about it but that the
    sum is made in float64 and told in float32.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape."""
        if self._generator is not None:
            return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        drawn = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64) >> (64 - _BITS)
        return torch.from_numpy(ndtri((drawn + 0.5) * 2.0**-_BITS)).reshape(tuple(shape))
