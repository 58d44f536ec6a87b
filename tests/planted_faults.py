"""Daemons of this process that end at a chosen frame."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from collapipe.wire.frames import Frame
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.daemon.server import Daemon
from pipeline.devices.daemon.session import Session


class Fault:
    """Ends a daemon at its ``number``-th frame (of ``kind``, if given), before or after the frame
    is sent or received."""

    def __init__(
        self, daemon: Daemon, number: int, sending: bool, before: bool, kind: str = ""
    ) -> None:
        self.daemon, self.number, self.kind = daemon, number, kind
        self.sending, self.before = sending, before
        self.seen = 0

    def hit(self, stream: FrameStream, sending: bool, before: bool, kind: str) -> bool:
        """Return whether the daemon ends at this frame."""
        if (sending, before) != (self.sending, self.before) or not self._own(stream):
            return False
        if self.kind not in ("", kind):
            return False
        self.seen += 1
        return self.seen == self.number

    def _own(self, stream: FrameStream) -> bool:
        session = self.daemon._session
        if session is None:
            return False
        return stream in (session.control, *session.neighbours.values())


@contextmanager
def planted(faults: list[Fault]) -> Iterator[None]:
    """Check for a due fault at every frame of every daemon's streams."""
    send, receive, part_of = FrameStream.send, FrameStream.receive, Session._part_of
    usual_hook = threading.excepthook

    def quiet_hook(exception: threading.ExceptHookArgs) -> None:
        """Report no thread that ended because of the fault itself."""
        if exception.exc_type is not SystemExit:
            usual_hook(exception)

    def check(stream: FrameStream, sending: bool, before: bool, kind: str = "") -> None:
        for fault in faults:
            if fault.hit(stream, sending, before, kind):
                threading.Thread(target=fault.daemon._server.stop, args=(None,)).start()
                raise SystemExit

    def faulty_send(stream: FrameStream, frame: Frame) -> None:
        check(stream, True, True, frame.kind.name)
        send(stream, frame)
        check(stream, True, False, frame.kind.name)

    def faulty_receive(stream: FrameStream, timeout_s: float | None = None) -> Frame:
        next_kind = stream._incoming[0][0].kind.name if stream._incoming else ""
        check(stream, False, True, next_kind)
        frame = receive(stream, timeout_s)
        check(stream, False, False, frame.kind.name)
        return frame

    def faulty_part(session: Session, *arguments: Any) -> Frame:
        """Check frames that are sent later at the time when they are made."""
        check(session.control, True, True, "PART")
        frame = part_of(session, *arguments)
        check(session.control, True, False, "PART")
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "send", faulty_send)
        patch.setattr(FrameStream, "receive", faulty_receive)
        patch.setattr(Session, "_part_of", faulty_part)
        patch.setattr(threading, "excepthook", quiet_hook)
        yield
