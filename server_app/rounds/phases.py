"""Wall time of a round's phases on the server."""

import time


class Phases:
    """Phases follow one another: each ends where the next begins."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def end(self, name: str) -> None:
        """The phase ``name`` ends now."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    @property
    def total_s(self) -> float:
        """Seconds since the first phase began."""
        return time.perf_counter() - self._began
