"""Units that take turns in one process encode their rows once, however many they are."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from client_app import app, control_unit


@pytest.mark.parametrize(
    ("cached", "place", "name"),
    [
        (app._cached_unit, app, "ControlUnit"),
        (control_unit._evaluator, control_unit, "load_held_out"),
    ],
    ids=["training", "evaluation"],
)
def test_each_unit_reads_its_rows_once(
    monkeypatch: pytest.MonkeyPatch,
    cached: Callable[..., Any],
    place: Any,
    name: str,
) -> None:
    settings, read = Mock(**{"federation.num_units": 150}), list[int]()
    monkeypatch.setattr(place, name, lambda settings, unit, other: read.append(unit))
    monkeypatch.setattr(place, "Tokenizer", SimpleNamespace(unpack=lambda text: text))
    more = ["{}", "validation"][: 2 if place is control_unit else 1]
    units = range(150)
    for _ in range(3):
        for unit in units:
            cached(settings, unit, *more)
    assert read == [*units]
