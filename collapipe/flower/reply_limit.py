"""The size of the largest reply that the server expects now.

The SuperLink's guard and the grid that pulls replies need this size before they read a reply.
"""

from collections.abc import Callable
from dataclasses import dataclass

MOST_PARTS = 10_000
"""The largest number of parts of a reply."""


@dataclass
class Expected:
    """The number of a run's last question, and the most bytes of a reply to any question so far:
    replies may be late. ``note`` passes both to the SuperLink's guard."""

    question: int = 0
    most_bytes: int = 0
    note: Callable[[int, int], None] = lambda question, most_bytes: None


expected = Expected()
"""The limit of this process, which is one run's ServerApp."""


def expect(most_bytes: int) -> None:
    """Set the largest reply size of a question before it is sent."""
    expected.question += 1
    expected.most_bytes = max(expected.most_bytes, most_bytes)
    expected.note(expected.question, expected.most_bytes)
