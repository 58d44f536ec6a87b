"""The number of cases that a test tries: a few by default, many with ``make test-thorough``."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES, THOROUGH_EXAMPLES = 10, 400  # for each property that hypothesis tests


def seeds(few: int, many: int) -> list[Any]:
    """Parameters 0 … ``many`` − 1; only the thorough run tries those from ``few`` on."""
    return chosen(range(many), range(few))


def chosen(every: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Parameters; only the thorough run tries those that are not in ``default``."""
    default = list(default)
    return [
        pytest.param(*_values(case), marks=() if case in default else pytest.mark.thorough)
        for case in every
    ]


def cases(few: int, many: int) -> int:
    """The number of a loop's cases: ``few``, or ``many`` in the thorough run."""
    return many if settings.default.max_examples > EXAMPLES else few


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
