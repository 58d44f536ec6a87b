"""Every message to a unit in this process gets a reply, even if its error cannot be described."""

import pytest
from flwr.app import Context, Message, RecordDict

from collapipe.flower.inline_grid import InlineGrid


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of paper"), "RuntimeError: out of paper"),
        (MuteError(), "MuteError, without its text (ValueError)"),
    ],
)
def test_a_unit_that_raises_replies_with_an_error(error: Exception, reason: str) -> None:
    def raising(message: Message, context: Context) -> Message:
        # A frame of code in a file whose state the machine does not report.
        exec(compile("raise error", f"/{'a' * 5000}", "exec"), {"error": error})
        raise AssertionError

    with InlineGrid(raising, 1) as grid:  # type: ignore[arg-type]
        message = Message(RecordDict(), 2, "train")
        (reply,) = grid.send_and_receive([message], timeout=5)
    assert reason in reply.error.reason
