"""Make Ctrl-C, SIGTERM and SIGHUP end a command reliably."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.1


@contextmanager
def sure_interrupts() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt`` as Ctrl-C does, and lose no interrupt.

    SIGHUP, which a closed terminal sends, does the same unless ``nohup`` ignores it.

    Python runs destructors and weak references' callbacks between any two steps of the main thread,
    and drops exceptions in them. An interrupt that is dropped there is sent again.
    """
    before = sys.unraisablehook

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            # Send it later, because here it would be dropped too. A signal also interrupts waiting
            # calls; SIGINT might be ignored.
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
