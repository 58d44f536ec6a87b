"""Handle standard streams that cannot be written: the run continues, and the status reports it."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from collapipe.errors import cause_of

_FAILED = 1
_lost = list[OSError | ValueError]()  # errors of standard output; ValueError: it is closed


def open_streams() -> None:
    """Open closed standard streams, and write letters that an encoding lacks as ``\\u2192``.

    Otherwise the next opened file would get the descriptor of standard output. ``sys.stdin`` stays
    None if it was closed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The new descriptor is the lowest free number, which is this one; children inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
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
    """Write what standard output still holds; return ``status``, or 1 for 0 if output was lost."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _lost.append(error)
        # The interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if _lost and not status:
        if not isinstance(_lost[0], BrokenPipeError):  # else its reader has closed it on purpose
            complain(f"error: standard output: {cause_of(_lost[0])}")
        return _FAILED
    return status


class _LastingOutput:
    """A stream that drops lines while it cannot be written: full disk, or closed terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._noting_errors():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._noting_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader, such as ``head``, has ended: end the run
            raise
        except (OSError, ValueError) as error:
            _lost.append(error)


def lasting_output() -> IO[str]:
    """Return standard output for a run's lines; the run continues if they cannot be written.

    The run's folder has the same figures, and ``write_rest`` reports the loss.
    """
    return cast(IO[str], _LastingOutput(sys.stdout or io.StringIO()))  # None without a console
