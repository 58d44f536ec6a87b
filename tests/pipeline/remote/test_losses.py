"""Whatever device is lost, and when: the round ends with the bits of a round without the loss."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from device_cluster import Work, daemons, device_name, plan_of

from collapipe.errors import RoundFailedError
from collapipe.wire.frames import Frame
from collapipe.wire.streams import FrameStream
from device_app.daemon import Daemon

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


class Fault:
    """Ends a daemon at its ``number``-th frame, before or after the frame is sent or taken."""

    def __init__(self, daemon: Daemon, number: int, sending: bool, before: bool) -> None:
        self.daemon, self.number = daemon, number
        self.sending, self.before = sending, before
        self.seen = 0

    def hit(self, stream: FrameStream, sending: bool, before: bool) -> bool:
        """Whether this frame is the one."""
        if (sending, before) != (self.sending, self.before) or not self._own(stream):
            return False
        self.seen += 1
        return self.seen == self.number

    def _own(self, stream: FrameStream) -> bool:
        session = self.daemon._session
        if session is None:
            return False
        around = session.neighbours
        return stream in (session.control, around.before, around.behind)


@contextmanager
def planted(faults: list[Fault]) -> Iterator[None]:
    """Every stream of every daemon looks whether a fault is due."""
    send, receive = FrameStream.send, FrameStream.receive

    def check(stream: FrameStream, sending: bool, before: bool) -> None:
        for fault in faults:
            if fault.hit(stream, sending, before):
                threading.Thread(target=fault.daemon._server.stop, args=(None,)).start()
                raise SystemExit

    def faulty_send(stream: FrameStream, frame: Frame) -> None:
        check(stream, True, True)
        send(stream, frame)
        check(stream, True, False)

    def faulty_receive(stream: FrameStream, timeout_s: float | None = None) -> Frame:
        check(stream, False, True)
        frame = receive(stream, timeout_s)
        check(stream, False, False)
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "send", faulty_send)
        patch.setattr(FrameStream, "receive", faulty_receive)
        yield


def points(count: int, seed: int) -> list[tuple[int, int, bool, bool]]:
    """Device, frame, sent or taken, before or after."""
    drawn = random.Random(seed)
    return [
        (drawn.randrange(3), drawn.randrange(1, 17), drawn.random() < 0.5, drawn.random() < 0.5)
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def expected() -> object:
    """The round without a loss."""
    return Work().inline(PLAN)


@pytest.mark.parametrize("point", points(12, 0), ids=str)
def test_a_fault_changes_nothing(point: tuple[int, int, bool, bool], expected: object) -> None:
    """At a frame of a device."""
    device, *when = point
    with daemons(3) as there:
        fault = Fault(there[device], *when)
        with planted([fault]):
            assert Work().remote(PLAN, there).equals(expected)  # type: ignore[arg-type]
        assert fault.seen >= fault.number


def test_a_fault_changes_nothing_where_hops_are_relayed(expected: object) -> None:
    work = Work(relay=True)
    with daemons(3) as there, planted([Fault(there[1], 9, True, True)]):
        assert work.remote(PLAN, there).equals(expected)  # type: ignore[arg-type]


def test_all_but_one_may_go(expected: object) -> None:
    """The second during the recovery from the first."""
    with daemons(3) as there:
        faults = [Fault(there[1], 9, True, True), Fault(there[0], 14, True, True)]
        with planted(faults):
            assert Work().remote(PLAN, there).equals(expected)  # type: ignore[arg-type]


def test_when_all_are_gone_the_unit_says_so() -> None:
    with daemons(2) as there:
        faults = [Fault(each, 9, True, True) for each in there]
        with planted(faults), pytest.raises(RoundFailedError, match="no device is left"):
            Work().remote(plan_of(NAMES[:2], (2, 2)), there)
