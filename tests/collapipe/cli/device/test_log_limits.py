"""Peers cannot forge lines of a daemon's log or fill the disk."""

import json
import logging

import pytest

from collapipe.cli.device import log_limits
from collapipe.cli.device.log_limits import JsonLines, LogLimits


def record(message: str, *arguments: object, error: Exception | None = None) -> logging.LogRecord:
    """A log record as a logger creates it."""
    raised = (type(error), error, None) if error else None
    return logging.LogRecord("a", logging.INFO, "a.py", 1, message, arguments, raised)


@pytest.mark.parametrize("text", ["a\nready on 1.2.3.4", "\x1b[2J\r", "x" * 10**6, "\u2028\x00"])
def test_a_record_is_one_short_printable_line(text: str) -> None:
    for each in (record("%s", text), record("%s", "peer", error=ValueError(text))):
        assert LogLimits().filter(each)
        line = logging.Formatter("%(message)s").format(each)
        assert line.isprintable() and len(line) < 500


def test_a_flood_of_records_is_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, now = LogLimits(), log_limits.time.monotonic()
    assert sum(limits.filter(record("bad frame")) for _ in range(10_000)) == 200
    monkeypatch.setattr("collapipe.cli.device.log_limits.time.monotonic", lambda: now + 61)
    later = record("served")
    assert limits.filter(later)
    assert later.getMessage() == "(9,800 lines were left out) served"
    assert limits.filter(record("served"))


def test_a_record_is_one_json_object() -> None:
    line = JsonLines().format(record("a\n%s", "b"))
    assert "\n" not in line
    assert json.loads(line).keys() == {"time", "level", "message"}
    assert json.loads(line)["message"] == "a\nb"
