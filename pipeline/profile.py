"""What devices take, measured: times of chunks → the chunk law that the planner uses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from collapipe.state import AffineLaw

_LEAST = 1e-18  # what a law may hold beside 0, see ``AffineLaw``; below is rounding


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Forward and backward of one micro-batch through δ = ``blocks`` blocks of a device."""

    device: str
    blocks: int
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over a device's chunk times t with x = (δ·b̂, δ): all that least squares needs of them.

    Attributes
    ----------
    xx
        Σ x·xᵀ: of (δb̂)², δ²b̂ and δ².
    xt, tt
        Σ x·t and Σ t².
    """

    count: int = 0
    xx: tuple[float, float, float] = (0.0, 0.0, 0.0)
    xt: tuple[float, float] = (0.0, 0.0)
    tt: float = 0.0

    def plus(self, chunk: ChunkTime) -> "Moments":
        """With one more chunk."""
        x, y, t = chunk.blocks * chunk.samples, chunk.blocks, chunk.seconds
        (a, b, c), (d, e) = self.xx, self.xt
        return Moments(
            self.count + 1,
            (a + x * x, b + x * y, c + y * y),
            (d + x * t, e + y * t),
            self.tt + t * t,
        )


@dataclass(frozen=True, slots=True)
class MeasuredLaw:
    """``residual_s`` is the root mean square of what the law leaves of the chunk times."""

    law: AffineLaw
    chunks: int
    residual_s: float


def add_up(before: Mapping[str, Moments], chunks: Iterable[ChunkTime]) -> dict[str, Moments]:
    """The devices' moments with these chunks."""
    moments = dict(before)
    for chunk in chunks:
        moments[chunk.device] = moments.get(chunk.device, Moments()).plus(chunk)
    return moments


def fit(moments: Moments, modelled: AffineLaw) -> MeasuredLaw:
    """u, v ≥ 0 of the least squares of t = δ·(u·b̂ + v); hops stay as they are modelled.

    Where all micro-batches had one size u and v cannot be told apart: the law is right there.
    """
    a, b, c = moments.xx
    values, vectors = np.linalg.eigh(np.array([[a, b], [b, c]]))
    root = (vectors * np.sqrt(np.maximum(values, 0.0))).T  # rootᵀ·root is Σ x·xᵀ
    kept = values > values.max() * 1e-12
    target = (vectors.T @ np.array(moments.xt))[kept] / np.sqrt(values[kept])
    found, _ = nnls(root[kept], target)
    found[found < _LEAST] = 0.0
    squares = moments.tt - 2 * found @ np.array(moments.xt) + found @ (root.T @ root) @ found
    residual_s = float(np.sqrt(max(squares, 0.0) / moments.count))
    u, v = found.tolist()
    return MeasuredLaw(replace(modelled, u=u, v=v), moments.count, residual_s)
