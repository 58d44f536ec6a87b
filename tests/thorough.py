"""How many cases of a property are tried: a few by default, many by ``make test-thorough``."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES, THOROUGH_EXAMPLES = 10, 400  # of a property with hypothesis


def seeds(few: int, many: int) -> list[Any]:
    """Parameters 0 … ``many`` − 1, of which the thorough run alone tries those from ``few`` on."""
    return chosen(range(many), range(few))


def chosen(every: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Parameters, of which the thorough run alone tries those that are not among ``default``."""
    default = list(default)
    return [
        pytest.param(*_values(case), marks=() if case in default else pytest.mark.thorough)
        for case in every
    ]


def cases(few: int, many: int) -> int:
    """Of a loop's cases ``few``; in the thorough run ``many``."""
    return many if settings.default.max_examples > EXAMPLES else few


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
