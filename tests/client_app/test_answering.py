"""A unit continues to answer after any message of its SuperNode."""

import logging
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskResponse

from client_app import answering
from client_app.answering import answer_messages
from client_app.app import app
from client_app.arrival import taken_s
from client_app.kept_store import KeptStore
from collapipe import __version__
from collapipe.flower import runtime
from collapipe.flower.runtime import Tasks

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Over(BaseException):
    """Ends the loop."""


class SuperNode:
    """Sends an unreadable message, a message whose reply comes too late, and one of an unknown
    kind; it accepts no heartbeat."""

    def __init__(self) -> None:
        self.tokens = ["unreadable", "late", "", "odd"]
        self.ended = list[str]()

    def AcquireTask(self, _: object) -> AcquireTaskResponse:  # noqa: N802 - Flower's name
        if not self.tokens:
            raise Over
        self.now = self.tokens.pop(0)
        return AcquireTaskResponse(token=self.now)

    def SendTaskHeartbeat(self, _: object) -> None:  # noqa: N802
        self.refuse()

    def pull(self, _: object) -> tuple[Message, Context, Any, None]:
        if self.now == "unreadable":
            raise ValueError("no message")
        taken_s()  # raises unless the message counts as taken before it is fetched
        context = Context(1, 1, {}, RecordDict(), {})
        run = type("Run", (), {"fab_id": "another/app", "fab_version": "1"})
        return Message(RecordDict(), 1, "query.odd"), context, run, None

    def push(self, _client: object, reply: Message, _context: object) -> None:
        assert isinstance(reply.error, Error) and "another/app" in reply.error.reason
        if self.now == "late":
            self.refuse()

    def end(self, _client: object, _context: object, status: str, _details: str) -> None:
        self.ended.append(status)

    def refuse(self) -> None:
        request = httpx.Request("POST", "http://127.0.0.1")
        raise httpx.HTTPStatusError("401", request=request, response=httpx.Response(401))

    def close(self) -> None:
        """Do nothing; Flower's client has this method."""


def answer_all(
    node: SuperNode, client: ClientApp, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Answer the messages of ``node`` with ``client`` until it has no more."""
    monkeypatch.setattr(runtime, "connect", lambda *_: node)
    monkeypatch.setattr(runtime, "pull_task_input", node.pull)
    monkeypatch.setattr(runtime, "push_message", node.push)
    monkeypatch.setattr(runtime, "push_task_output", node.end)
    with pytest.raises(Over):
        answer_messages(Tasks("127.0.0.1:0", b"secret"), KeptStore(folder), client)


def test_each_message_is_ended_and_the_next_one_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = SuperNode()
    answer_all(node, app, monkeypatch, tmp_path)
    assert node.ended == [SubStatus.FAILED, SubStatus.FAILED, SubStatus.COMPLETED]


class Panic(BaseException):
    """Like an error of a Rust library, which is not an ``Exception``."""


class Unexpected(SuperNode):
    """Raises at each step before a message can be answered."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.replies = ["no token", "unreadable", "sound"], list[Message]()

    def AcquireTask(self, request: object) -> AcquireTaskResponse:  # noqa: N802 - Flower's name
        found = super().AcquireTask(request)
        if found.token == "no token":
            raise SystemExit(1)
        return found

    def pull(self, _: object) -> tuple[Message, Context, Any, None]:
        if self.now == "unreadable":
            raise Panic
        run = type("Run", (), {"fab_id": "collapipe/collapipe", "fab_version": __version__})
        return Message(RecordDict(), 1, "query.odd"), Context(1, 1, {}, RecordDict(), {}), run, None

    def push(self, _client: object, reply: Message, _context: object) -> None:
        self.replies.append(reply)

    def end(self, _client: object, _context: object, status: str, _details: str) -> None:
        self.ended.append(status)
        if status == SubStatus.FAILED:
            raise RuntimeError("the SuperNode has forgotten the message")


@pytest.mark.parametrize("error", [ValueError("secret"), SystemExit(0), Panic("secret")])
def test_a_unit_answers_after_any_exception(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the SuperNode would stay online although no thread answers."""

    def raising(message: Message, context: Context) -> Message:
        raise error

    node = Unexpected()
    monkeypatch.setattr(answering, "_PAUSE_S", 0)
    answer_all(node, cast(ClientApp, raising), monkeypatch, tmp_path)
    (reply,) = node.replies
    assert reply.error.reason == f"{type(error).__name__}; see the unit's log"
    assert node.ended == [SubStatus.FAILED, SubStatus.COMPLETED]


class Restarting(SuperNode):
    """Ends before the reply arrives, so that no request reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = ["late"]

    def refuse(self) -> None:
        raise httpx.ConnectError("connection refused")

    def end(self, client: object, context: object, status: str, details: str) -> None:
        super().end(client, context, status, details)
        self.refuse()


def test_a_restart_of_the_supernode_logs_only_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Restarting()
    answer_all(node, app, monkeypatch, tmp_path)
    assert node.ended == [SubStatus.FAILED]
    levels = [each.levelno for each in caplog.records]
    assert [each for each in levels if each > logging.INFO] == [logging.WARNING]
