"""Cooperative cancellation: code checks between steps whether it should end."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from collapipe.errors import CancelledRoundError


class Cancellation:
    """An event and a deadline; either ends the work at its next ``check``."""

    def __init__(self, parent: "Cancellation | None", timeout_s: float | None) -> None:
        self._event = threading.Event()
        self._parent = parent
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def cancel(self) -> None:
        """Ask the work to end."""
        self._event.set()

    def check(self) -> None:
        """Raise ``CancelledRoundError`` if the work should end."""
        if self._parent is not None:
            self._parent.check()
        if self._event.is_set():
            raise CancelledRoundError("the round was cancelled")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise CancelledRoundError(
                f"not done within federation.round_timeout_s={self._timeout_s:g}; raise it or "
                "give the unit less work"
            )


_NEVER = Cancellation(parent=None, timeout_s=None)
_current = ContextVar("collapipe_cancellation", default=_NEVER)


def check() -> None:
    """Raise ``CancelledRoundError`` if the work of this context should end."""
    _current.get().check()


@contextmanager
def cancellable(timeout_s: float | None = None) -> Iterator[Cancellation]:
    """Make the work inside cancellable, with a limit of ``timeout_s`` seconds; scopes nest."""
    scope = Cancellation(_current.get(), timeout_s)
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
