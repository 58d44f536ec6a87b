"""Sums of losses are exact, so they do not depend on the order or the division of rows."""

import math
from fractions import Fraction
from functools import reduce
from operator import add
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collapipe.statistics import Statistics, exact_sum

finite = st.floats(-1e100, 1e100)


def statistics(losses: list[float]) -> Statistics:
    return Statistics(len(losses), 2 * len(losses), exact_sum(losses), np.ones(3, np.int64))


@given(st.lists(finite, max_size=30))
def test_an_exact_sum_equals_the_sum_of_fractions(terms: list[float]) -> None:
    parts = exact_sum(terms)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, terms))
    assert len(parts) <= 42  # each part has 53 of the bits that a float can have


@given(st.lists(st.lists(finite, min_size=1, max_size=8), min_size=1, max_size=5), st.randoms())
def test_added_parts_have_the_same_loss_as_the_whole(
    parts: list[list[float]], random: Random
) -> None:
    whole = statistics([loss for part in parts for loss in part])
    random.shuffle(parts)
    added = reduce(add, map(statistics, parts))
    assert added.loss == whole.loss == math.fsum(whole.losses) / whole.tokens
    assert (added.rows, added.tokens) == (whole.rows, whole.tokens)
    assert added.counts.tolist() == [len(parts)] * 3
