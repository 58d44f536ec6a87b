"""Figures have a suitable unit, separated thousands and a noun in the right number."""

import pytest

from collapipe.formatting import counted, seconds


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (2e-6, "2.00 us"), (0.5, "500 ms"), (1234.5, "1,234 s")]
)
def test_seconds_have_a_suitable_unit(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "row", "0 rows"), (1, "row", "1 row"), (12_345, "batch", "12,345 batches")],
)
def test_a_counted_noun_is_singular_or_plural(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
