"""Ctrl-C, SIGTERM and SIGHUP end a command wherever they find it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.1


@contextmanager
def sure_interrupts() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` as Ctrl-C does, and none is lost; so does SIGHUP, which
    a terminal sends when it is closed, unless ``nohup`` has it ignored.

    Python runs destructors and callbacks of weak references between any two steps of the main
    thread, and drops what is raised there; an interrupt that meets one is sent again.
    """
    before = sys.unraisablehook

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            # Not from here, where it would be dropped as well; it also ends what the thread waits
            # for, and is not SIGINT, which might be ignored.
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_S, signal.pthread_kill, [main, signal.SIGTERM]).start()
        else:
            before(what)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
