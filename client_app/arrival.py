"""When the message that is being answered was taken, by the clock of a round's phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_taken_s: ContextVar[float] = ContextVar("collapipe_message_taken")


@contextmanager
def message_taken() -> Iterator[None]:
    """What is inside answers a message that is taken now; of nested ones the outermost counts,
    which has fetched it."""
    token = _taken_s.set(_taken_s.get(time.perf_counter()))
    try:
        yield
    finally:
        _taken_s.reset(token)


def taken_s() -> float:
    """When the message was taken, of ``time.perf_counter``."""
    return _taken_s.get()
