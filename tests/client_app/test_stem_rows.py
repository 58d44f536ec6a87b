"""The count of rows that a stem computes equals a count row by row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from client_app.control_unit import StemRows

SIZES = np.array([3, 5, 1, 4, 2, 6])
STEPS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), max_size=6)


@given(STEPS, st.sampled_from([0, 4, 9, 21]))
def test_a_cached_row_is_not_computed_again(steps: list[list[int]], limit: int) -> None:
    stem = StemRows(SIZES, np.zeros(6, np.bool_), limit)
    for step in steps:
        before, computed = stem.kept.copy(), stem.computed
        stem.take(np.array(step))
        assert stem.computed - computed == sum(not before[row] for row in step)
        assert set(np.flatnonzero(stem.kept & ~before)) <= set(step)
        assert SIZES[stem.kept].sum() <= limit
        if limit >= SIZES.sum():
            assert stem.kept[step].all()
