"""What the sparse graph promises, computed from its neighbours in another way."""

from fractions import Fraction
from math import comb

import pytest
from scipy.stats import hypergeom

from collapipe.secure_aggregation.graph import (
    SPARSE_FROM,
    neighbours,
    shares_needed,
    units_needed,
)

NUM_UNITS = [SPARSE_FROM, 21, 25, 30, 36, 44, 55, 60, 100]
THRESHOLDS = [0.51, 0.6, 2 / 3, 0.7, 0.75, 0.76, 0.78, 0.8, 0.82, 5 / 6, 0.84, 0.9, 1.0]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("num_units", NUM_UNITS)
def test_failures_are_as_improbable_as_promised(num_units: int, threshold: float) -> None:
    degree = len(neighbours(0, range(num_units), threshold))
    left, need = units_needed(num_units, threshold), shares_needed(num_units, threshold)
    colluding, gone = num_units // 5, num_units - left
    known = float(hypergeom(num_units - 1, colluding, degree).sf(need - 1))
    assert num_units * known <= 2**-40
    of_one_there = float(hypergeom(num_units - 1, left - 1, degree).cdf(need - 2))
    of_one_gone = float(hypergeom(num_units - 1, left, degree).cdf(need - 1)) if gone else 0.0
    assert num_units * max(of_one_there, of_one_gone) <= 2**-20
    if degree < num_units - 1:
        assert two_gaps(num_units, gone + colluding, degree // 2) <= Fraction(2) ** -40


def two_gaps(units: int, removed: int, reach: int) -> Fraction:
    """The probability that two or more of the runs of ``removed`` ones, between neighbours of those
    that stay on the ring, have ``reach`` or more: then it falls into parts."""
    stay = units - removed

    def with_long(count: int) -> int:
        """How often exactly so many of the runs are so long."""
        return comb(stay, count) * sum(
            (-1) ** more
            * comb(stay - count, more)
            * comb(removed - (count + more) * reach + stay - 1, stay - 1)
            for more in range(stay - count + 1)
            if removed >= (count + more) * reach
        )

    whole = comb(removed + stay - 1, stay - 1)
    return 1 - Fraction(with_long(0) + with_long(1), whole)
