"""Figures have a suitable unit, separated thousands and a noun in the right number."""

import pytest

from collapipe.formatting import amount, counted, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0 s"), (2e-6, "2.00 us"), (0.5, "500 ms"), (1234.5, "1,234 s")],
        *[(0.9994, "999 ms"), (0.9996, "1.00 s"), (9.996e-4, "1.00 ms")],
    ],
)
def test_seconds_have_a_suitable_unit(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_400, "999 kB"), (999_600, "1 MB"), (2.5e15, "2,500 TB")],
)
def test_amounts_have_a_suitable_prefix(value: float, text: str) -> None:
    assert amount(value, "B") == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "row", "0 rows"), (1, "row", "1 row"), (12_345, "batch", "12,345 batches")],
)
def test_a_counted_noun_is_singular_or_plural(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
