"""Statistics from which an evaluation's metrics are computed; they add up over sets of rows."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of a model's predictions for some rows.

    Sums are exact: the sum of the statistics of subsets equals the statistics of all rows, to the
    last bit and in any order.
    """

    rows: int
    tokens: int  # target tokens
    losses: tuple[float, ...]  # their exact sum is the sum of the tokens' losses, see ``exact_sum``
    counts: NDArray[np.int64]  # the task defines the shape, see ``Task.count``

    @property
    def loss(self) -> float:
        """Mean loss per target token."""
        return math.fsum(self.losses) / self.tokens

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.rows + other.rows,
            self.tokens + other.tokens,
            exact_sum((*self.losses, *other.losses)),
            self.counts + other.counts,
        )


def exact_sum(terms: Iterable[float]) -> tuple[float, ...]:
    """Return a few floats whose exact sum equals the exact sum of ``terms``.

    They are the rounded sum, then the rounded remainder, and so on; empty if the sum is 0.
    """
    terms, parts = tuple(terms), list[float]()
    while part := math.fsum((*terms, *(-each for each in parts))):
        parts.append(part)
    return tuple(parts)
