"""Laws from measurements: both numbers of an affine time, by least squares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True, slots=True)
class Fit:
    """seconds ≈ each·x + fixed·y; ``error`` is the root mean square of relative residuals."""

    each: float
    fixed: float
    error: float


def fit(points: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Fit:
    """The numbers that are not negative and fit best what each point (x, y) took.

    Of a chunk of δ blocks and b̂ samples (x, y) = (δ·b̂, δ) gives u and v of C = δ·(u·b̂ + v); of a
    hop (b̂, 1) gives w and ℓ of H = w·b̂ + ℓ. What is squared are relative residuals, since a clock
    and a busy machine spoil long times as much as short ones: min ‖A·z − 1‖ with rows (x, y)/t.
    Where a larger x took no longer, ``each`` is 0.
    """
    rows = np.asarray(points, float) / np.asarray(seconds, float)[:, None]
    scales = np.linalg.norm(rows, axis=0)
    scaled, norm = nnls(rows / scales, np.ones(len(rows)))
    each, fixed = scaled / scales
    return Fit(float(each), float(fixed), float(norm / np.sqrt(len(rows))))
