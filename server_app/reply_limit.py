"""The size of the largest reply that the server expects now.

The SuperLink's guard and the grid that pulls replies need it before replies are read.
"""

from collections.abc import Callable
from dataclasses import dataclass

MOST_PARTS = 10_000
"""Parts of a reply, at most."""


@dataclass
class Expected:
    """Of a run's last question: its number, and the most bytes of a reply to it or to an earlier
    one, which may be late. ``note`` tells the SuperLink's guard of both."""

    question: int = 0
    most_bytes: int = 0
    note: Callable[[int, int], None] = lambda question, most_bytes: None


expected = Expected()
"""Of this process, which is one run's ServerApp."""


def expect(most_bytes: int) -> None:
    """Say before a question is sent how large the largest reply to it is."""
    expected.question += 1
    expected.most_bytes = max(expected.most_bytes, most_bytes)
    expected.note(expected.question, expected.most_bytes)
