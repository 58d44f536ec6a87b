"""Opening and accepting a stream of frames, without a network."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from collapipe.errors import BusyLinkError, LinkError
from collapipe.wire.streams import channels
from collapipe.wire.streams.channels import open_stream, serve_stream
from collapipe.wire.streams.frame_stream import ACCEPTED, FrameStream


class Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """The error of a call that the server has refused."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "device-0 works for unit 1"


class Call:
    """A call with the messages of ``brings``, whose metadata never arrives.

    A call of gRPC can behave in this way if its connection ends at a bad moment.
    """

    def __init__(self, brings: "Callable[[Call], Iterator[bytes]]") -> None:
        self._brings, self.cancelled, self.answered = brings, threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        return self._brings(self)

    def initial_metadata(self) -> None:
        self.answered.wait()

    def is_active(self) -> bool:
        return not self.cancelled.is_set()

    def cancel(self) -> None:
        self.cancelled.set()

    def channel(self) -> Any:
        """A channel that opens only this call."""
        made = self

        class Channel:
            def stream_stream(self, method: str) -> Callable[..., Call]:
                return lambda *arguments, **named: made

        return Channel()


def opened(call: Call) -> FrameStream:
    return open_stream(call.channel(), "/a/b", "device-0", 100, threading.Event())


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.is_alive()}


def refused(call: Call) -> Iterator[bytes]:
    raise Refused
    yield b""


def silent(call: Call) -> Iterator[bytes]:
    call.cancelled.wait()
    yield from ()


def accepting(call: Call) -> Iterator[bytes]:
    yield ACCEPTED
    yield from silent(call)


def test_a_refused_stream_leaves_no_thread_and_keeps_its_error_type() -> None:
    before, call = threads(), Call(refused)
    with pytest.raises(BusyLinkError, match="RESOURCE_EXHAUSTED: device-0 works"):
        opened(call)
    for each in threads() - before:
        each.join(5)
    assert not threads() - before
    assert call.cancelled.is_set()


def test_an_unanswered_stream_is_cancelled_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CONNECT_S", 0.0)
    call = Call(silent)
    with pytest.raises(LinkError, match="not accepted within 0 s"):
        opened(call)
    assert call.cancelled.is_set()


def test_a_stream_is_open_once_it_is_accepted() -> None:
    stream = opened(Call(accepting))
    assert not stream.over and not stream.waiting()
    stream.close()


class Unstartable(threading.Thread):
    """A thread of a process that has too many."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_a_stream_without_a_thread_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "threading", SimpleNamespace(Thread=Unstartable))
    call = Call(silent)
    with pytest.raises(LinkError, match="device-0: can't start new thread"):
        opened(call)
    assert call.cancelled.is_set()


class Ended:
    """A server's call that ended before its handler could add a callback."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def test_a_call_that_has_ended_occupies_no_thread_of_a_server() -> None:
    stream = FrameStream("gone", 100)
    assert [*serve_stream(stream, iter(()), Ended())] == [ACCEPTED]  # type: ignore[arg-type]


def test_a_stream_that_ends_once_it_is_accepted_is_open_until_its_last_frame() -> None:
    """Otherwise the reason why a device leaves would be lost."""
    stream = FrameStream("device-0", 100)
    stream.feed([ACCEPTED])
    stream.wait_until_accepted(0.0)
    with pytest.raises(LinkError, match="ended"):
        stream.receive(0.0)
