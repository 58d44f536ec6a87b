"""The largest reply that the server expects now, for those who receive replies before they are
read: the SuperLink's guard and the grid that pulls them."""

from dataclasses import dataclass


@dataclass
class _Expected:
    most_bytes: int = 0


expected = _Expected()
"""Of this process, which is one run's ServerApp."""


def expect(most_bytes: int) -> None:
    """Say before a question is sent how large the largest reply to it is."""
    expected.most_bytes = max(expected.most_bytes, most_bytes)
