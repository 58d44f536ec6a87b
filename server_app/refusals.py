"""What the server's log says of strangers."""

import logging

from collapipe.errors import one_line

_MOST = 1000  # strangers that are named: they choose how many they are


class Refusals:
    """Says once of each stranger that it was refused, in the ``log``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._said = log, set[str]()

    def note(self, who: str, why: str) -> None:
        """Such as an address or a key, of no secret; both may have a stranger's words in them."""
        said = one_line(f"{who} is refused: {why}")
        if said in self._said or len(self._said) == _MOST:
            return
        self._said.add(said)
        last = "; others are not named any more" if len(self._said) == _MOST else ""
        self._log.warning("%s%s", said, last)
