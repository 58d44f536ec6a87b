"""A prompt grid delivers all replies and stops waiting at the timeout."""

import time
from collections.abc import Iterable
from unittest.mock import Mock

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from collapipe.flower.inline_grid import InlineGrid
from collapipe.flower.prompt_grid import Replies, make_prompt


class Slow(InlineGrid):
    """Delivers one reply at every second poll, and never a reply to the fourth message."""

    def __init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.looks, self.pushed = 0, {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            self.pushed[str(number)] = message
        return list(self.pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks += 1
        waiting = sorted(message_ids)
        if self.looks % 2 or waiting == ["3"]:
            return []
        return [Message(RecordDict(), reply_to=self.pushed[waiting[0]])]


@pytest.mark.parametrize(("count", "timeout"), [(3, None), (3, 60.0), (4, 0.3)])
def test_each_reply_arrives_once_and_a_silent_node_times_out(
    count: int, timeout: float | None
) -> None:
    grid = Slow()
    messages = [Message(RecordDict(), node, "train") for node in range(2, count + 2)]
    replies = list(make_prompt(grid).send_and_receive(messages, timeout=timeout))
    answered = [reply.metadata.reply_to_message_id for reply in replies]
    assert answered == ["0", "1", "2"]


def test_messages_without_a_reply_at_the_timeout_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten, grid = list[list[str]](), Slow()
    replies = Mock(pull=grid.pull_messages, forget=lambda ids: forgotten.append([*ids]))
    monkeypatch.setattr(Replies, "of", lambda grid: replies)
    messages = [Message(RecordDict(), node, "train") for node in range(2, 6)]
    make_prompt(grid).send_and_receive(messages, timeout=0.3)
    assert forgotten == [["3"]]


class Stuck(Slow):
    """The first node disconnects during its upload: pulling its reply exceeds the timeout."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        key = min(message_ids)
        time.sleep(0.2 if key == "0" else 0.0)
        return [Message(RecordDict(), reply_to=self.pushed[key])]


def test_a_stuck_reply_does_not_lose_the_other_reply() -> None:
    messages = [Message(RecordDict(), node, "train") for node in (2, 3)]
    assert len([*make_prompt(Stuck()).send_and_receive(messages, timeout=0.1)]) == 2


class Disconnected(Slow):
    """The server's own node answers for the second node, which has disconnected.

    The message to the third node cannot be sent.
    """

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        first, second, _ = super().push_messages(messages)
        return [first, second, None]  # type: ignore[list-item]  # as Flower's own grid does

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for key in message_ids:
            request = self.pushed[key]
            reply = Message(RecordDict(), reply_to=request)
            if key == "1":
                reply = Message(Error(5, "node is unavailable"), reply_to=request)
                reply.metadata.__dict__["_src_node_id"] = 1
            yield reply


def test_an_error_for_a_disconnected_node_is_attributed_to_that_node() -> None:
    messages = [Message(RecordDict(), node, "train") for node in (2, 3, 4)]
    replies = make_prompt(Disconnected()).send_and_receive(messages, timeout=60.0)
    failed = {reply.metadata.src_node_id: reply.has_error() for reply in replies}
    assert failed == {2: False, 3: True, 4: True}
