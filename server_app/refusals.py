"""Log refused callers, each of them once."""

import logging

from collapipe.errors import one_line

_MOST = 1000  # callers in the log; a limit, because callers can choose many names


class Refusals:
    """Writes one line to the ``log`` for each caller that was refused."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._said = log, set[str]()

    def note(self, who: str, why: str) -> None:
        """Log that ``who``, such as an address or a key's fingerprint, was refused, and ``why``.
        Both may contain the caller's text."""
        said = one_line(f"{who} is refused: {why}")
        if said in self._said or len(self._said) == _MOST:
            return
        self._said.add(said)
        last = "; others are not named any more" if len(self._said) == _MOST else ""
        self._log.warning("%s%s", said, last)
