"""Fit the two coefficients of an affine time law to measurements, by least squares."""

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
    """Fit non-negative coefficients of x and y to ``seconds`` by relative least squares.

    For chunks of δ blocks and b̂ samples, points (δ·b̂, δ) give u and v of C = δ·(u·b̂ + v). For hops,
    points (b̂, 1) give w and ℓ of H = w·b̂ + ℓ. Residuals are relative, min ‖A·z − 1‖ with rows
    (x, y)/t, because errors of a busy machine grow with the measured time. If larger x took no
    longer, ``each`` is 0.
    """
    rows = np.asarray(points, float) / np.asarray(seconds, float)[:, None]
    scales = np.linalg.norm(rows, axis=0)
    scaled, norm = nnls(rows / scales, np.ones(len(rows)))
    each, fixed = scaled / scales
    return Fit(float(each), float(fixed), float(norm / np.sqrt(len(rows))))
