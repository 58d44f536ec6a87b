"""Notice that this process was paused, and for how long nothing has moved in a cluster."""

import time
from collections.abc import Iterable

_PAUSED_S = 1.0  # if checks are further apart, this process was paused


class Watch:
    """The times of one loop that waits for devices.

    ``checked_s`` is when it checked last, ``awake_s`` the sum of the times between its checks, both
    in seconds. Pauses of this process are left out, because then no device was silent.
    """

    def __init__(self) -> None:
        self.checked_s = self._moved_s = time.monotonic()
        self.awake_s = 0.0

    def was_paused(self) -> bool:
        """Check the time. Returns whether this process was paused since the last check."""
        now = time.monotonic()
        passed_s, self.checked_s = now - self.checked_s, now
        if passed_s > _PAUSED_S:
            self._moved_s = now
            return True
        self.awake_s += passed_s
        return False

    def reset(self) -> None:
        """Call while devices wait for another machine, or for this process."""
        self._moved_s = time.monotonic()

    def still_s(self, moved_s: Iterable[float]) -> float:
        """Return the seconds for which nothing has moved, from the last times that anything did."""
        return self.checked_s - max(self._moved_s, *moved_s)
