"""Log refused callers, each of them once."""

import logging

from collapipe.errors import one_line

_MOST = 1000  # callers in the log; a limit, because callers can choose many names


class Refusals:
    """Writes one line to the ``log`` for each caller that was refused."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._logged = log, set[str]()

    def note(self, caller: str, why: str) -> None:
        """Log that ``caller``, such as an address or a key's fingerprint, was refused, and ``why``.
        Both may contain the caller's text."""
        line = one_line(f"{caller} is refused: {why}")
        if line in self._logged or len(self._logged) == _MOST:
            return
        self._logged.add(line)
        last = "; others are not named any more" if len(self._logged) == _MOST else ""
        self._log.warning("%s%s", line, last)
