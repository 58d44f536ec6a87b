"""The time at which the current message was received, by the clock of a round's phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_taken_s: ContextVar[float] = ContextVar("collapipe_message_taken")


@contextmanager
def message_taken() -> Iterator[None]:
    """Record the current time as the arrival of the message that the context answers. In nested
    contexts the outermost time counts."""
    token = _taken_s.set(_taken_s.get(time.perf_counter()))
    try:
        yield
    finally:
        _taken_s.reset(token)


def taken_s() -> float:
    """Return the current message's arrival by ``time.perf_counter``."""
    return _taken_s.get()
