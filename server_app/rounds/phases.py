"""Wall time of a round's phases on the server."""

import time


class Phases:
    """Measures consecutive phases: each begins when the one before it ends."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def end(self, name: str) -> None:
        """End the current phase and record its seconds as ``name``."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    @property
    def total_s(self) -> float:
        """Seconds since the first phase began."""
        return time.perf_counter() - self._began
