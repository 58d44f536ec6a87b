"""A daemon's log: peers can neither add lines to it nor fill the disk with it."""

import json
import logging
import time
from datetime import UTC, datetime

from collapipe.errors import one_line

_WHILE_S, _MOST_LINES = 60.0, 200


class JsonLines(logging.Formatter):
    """Writes each record as a line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        return json.dumps(line)


class LogLimits(logging.Filter):
    """Makes each record one printable line, and drops lines beyond ``_MOST_LINES`` in a minute.

    The next line reports how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began, self._lines = time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        left_out, late = self._lines - _MOST_LINES, time.monotonic() - self._began > _WHILE_S
        error = record.exc_info[1] if record.exc_info else None
        message = record.getMessage() + (f": {error}" if error else "")
        if late:
            self._began, self._lines = time.monotonic(), 0
            message = f"({left_out:,} lines were left out) {message}" if left_out > 0 else message
        record.msg, record.args, record.exc_info = one_line(message), None, None
        self._lines += 1
        return self._lines <= _MOST_LINES
