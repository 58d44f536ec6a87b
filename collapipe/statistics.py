"""What an evaluation's figures are computed from: statistics of parts of the rows add up."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Of a model's answers to some rows.

    Sums are exact, so that figures do not depend on how rows are parted nor on their parts' order:
    those of a sum of statistics are those of all rows at once, to the last digit.

    Attributes
    ----------
    rows, tokens
        How many rows there are, and target tokens in them.
    losses
        Floats whose exact sum is that of the tokens' losses, as ``exact_sum`` makes them.
    counts
        int64, of the task's own shape, see ``Task.count``.
    """

    rows: int
    tokens: int
    losses: tuple[float, ...]
    counts: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Per target token."""
        return math.fsum(self.losses) / self.tokens

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.rows + other.rows,
            self.tokens + other.tokens,
            exact_sum((*self.losses, *other.losses)),
            self.counts + other.counts,
        )


def exact_sum(terms: Iterable[float]) -> tuple[float, ...]:
    """Few floats with the same sum, nothing of which is rounded off: the sum as a float, then that
    of what it lacks, and so on. Empty where the sum is 0."""
    terms, parts = tuple(terms), list[float]()
    while part := math.fsum((*terms, *(-each for each in parts))):
        parts.append(part)
    return tuple(parts)
