"""Standard streams that cannot be written: a run goes on, a line says so, and the status tells."""

import os
import sys
from contextlib import suppress

from collapipe.errors import one_line

_FAILED = 1


def open_streams() -> None:
    """Open descriptors that were closed, and write letters that an encoding lacks as ``\\u2192``.

    Else the next file that is opened would take the place of standard output. ``sys.stdin`` stays
    None if it was closed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Print a line on standard error if that is possible."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_rest(status: int) -> int:
    """Write what standard output still holds; return ``status``, or 1 for 0 if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not status and not isinstance(error, BrokenPipeError):  # its reader has read enough
            complain(f"error: standard output: {one_line(error.strerror)}")
        # The interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or _FAILED
    return status
