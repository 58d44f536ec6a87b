"""Seconds of a round by activity."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds spent inside ``timer.phase(name)``. ``began_s`` is the start of the first
    phase by ``time.perf_counter``."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.began_s = math.inf

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        start = time.perf_counter()
        self.began_s = min(self.began_s, start)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count these seconds of the phase ``source`` as ``target``."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
