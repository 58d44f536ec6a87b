"""Units in one process: every message gets a reply, and few units compute at once."""

import threading
import time
from collections.abc import Callable

import pytest
from flwr.app import Context, Message, RecordDict

from collapipe.flower.inline_grid import InlineGrid
from collapipe.process import cancellation


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


def ask(grid: InlineGrid, timeout: float) -> list[int]:
    """Ask all nodes, and return those that reply without an error."""
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=timeout)
    return [each.metadata.src_node_id for each in replies if not each.has_error()]


def app(work: Callable[[int], None]) -> Callable[[Message, Context], Message]:
    def answer(message: Message, context: Context) -> Message:
        work(context.node_id)
        return Message(RecordDict(), reply_to=message)

    return answer


def test_units_work_on_two_cores_in_turns_and_the_last_four_at_once() -> None:
    lock, last = threading.Lock(), threading.Barrier(4)
    begun, ended = 0, 0

    def work(node: int) -> None:
        nonlocal begun, ended
        with lock:
            begun += 1
            assert begun - ended <= 2 or ended >= 5
        if node >= 7:
            last.wait(timeout=10)
        else:
            time.sleep(0.02)  # a third node would begin
        with lock:
            ended += 1

    with InlineGrid(app(work), 9, cores=2) as grid:  # type: ignore[arg-type]
        assert ask(grid, timeout=20) == [*range(2, 11)]


def test_a_unit_without_a_turn_before_the_timeout_does_not_work() -> None:
    begun = list[int]()

    def work(node: int) -> None:
        begun.append(node)
        while node == 2:
            cancellation.check()

    with InlineGrid(app(work), 4, cores=1) as grid:  # type: ignore[arg-type]
        assert ask(grid, timeout=0.1) == []
        assert begun == [2]
