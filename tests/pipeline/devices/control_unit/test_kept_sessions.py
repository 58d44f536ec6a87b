"""Between two rounds a device keeps the control unit's session, unless another caller needs it."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cluster import INSECURE, Work, daemons, device_name, plan_of
from made_cluster import Cluster

from collapipe.credentials.member import Role
from collapipe.errors import BusyLinkError, LinkError
from collapipe.wire.channels import Channels, Dialer
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream
from pipeline.devices.control_unit import connection
from pipeline.devices.control_unit.connection import DeviceConnection, ask_status
from pipeline.devices.daemon import server
from pipeline.devices.daemon import session as daemon_session
from pipeline.devices.daemon.server import Daemon, DeviceSettings
from pipeline.devices.daemon.session import Session
from pipeline.devices.messages import CONTROL

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))
RELEASE = Frame(FrameKind.RELEASE, 0, 0, 0)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """All sessions of daemons."""
    found, run = list[Session](), Session.run

    def noted(self: Session) -> None:
        found.append(self)
        run(self)

    monkeypatch.setattr(Session, "run", noted)
    return found


@pytest.fixture
def kept() -> Iterator[Channels]:
    with Channels(INSECURE) as channels:
        yield channels


def soon(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def once_idle(kept: Channels, sessions: list[Session]) -> None:
    """Wait until the devices have released their segments, and all their streams are kept."""
    soon(lambda: all(each.idle for each in sessions) and len(kept._idle) == len(sessions))


def test_a_second_round_continues_in_the_sessions_of_the_first(
    kept: Channels, sessions: list[Session]
) -> None:
    work = Work()
    with daemons(3) as there:
        first = work.remote(PLAN, there, kept=kept)
        once_idle(kept, sessions)
        assert all(each.held is None for each in sessions)
        status = ask_status(INSECURE, DeviceAddress(NAMES[0], there[0].address))
        assert (status.busy, status.unit) == (False, None) and status.flops_per_s
        assert work.remote(PLAN, there, kept=kept).equals(first)
    assert len(sessions) == 3


def test_another_control_unit_takes_devices_between_rounds(
    kept: Channels, sessions: list[Session]
) -> None:
    work = Work()
    with daemons(3) as there:
        first = work.remote(PLAN, there, kept=kept)
        once_idle(kept, sessions)
        assert work.remote(PLAN, there).equals(first)
        soon(lambda: all(each.control.over for each in sessions[:3]))
        assert work.remote(PLAN, there, kept=kept).equals(first)
    assert len(sessions) == 9


def test_no_caller_takes_a_device_once_a_round_has_begun(
    kept: Channels, sessions: list[Session]
) -> None:
    with daemons(1) as there, Channels(INSECURE) as other:
        Work().remote(plan_of(NAMES[:1], (4,)), there, kept=kept)
        once_idle(kept, sessions)
        device, arrived = DeviceAddress(NAMES[0], there[0].address), threading.Event()
        again = DeviceConnection(device, kept, arrived, lambda *_: None, part_bytes=77)
        assert again.control.max_bytes == 77
        with pytest.raises(BusyLinkError, match="works for another control unit"):
            other.stream(device, CONTROL, 2**20, arrived)
        assert not again.control.over and kept.take_idle(device, CONTROL) is None
        again.close()
    assert len(sessions) == 1


def test_a_device_that_does_not_answer_in_its_session_is_dialled_again(
    kept: Channels, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, answer = Work(), Session._send_time

    def silent(self: Session, frame: Frame) -> None:
        if frame.round:
            answer(self, frame)
        else:
            soon(lambda: self.control.over)

    with daemons(3) as there:
        first = work.remote(PLAN, there, kept=kept)
        once_idle(kept, sessions)
        monkeypatch.setattr(connection, "_ANSWER_S", 0.2)
        monkeypatch.setattr(Session, "_send_time", silent)
        assert work.remote(PLAN, there, kept=kept).equals(first)
    assert len(sessions) == 6


def test_a_round_that_fails_keeps_no_session(kept: Channels, sessions: list[Session]) -> None:
    with daemons(3) as there:
        with pytest.raises(ZeroDivisionError), Work().segments(PLAN, there, kept=kept):
            raise ZeroDivisionError
        for name, each in zip(NAMES, there, strict=True):
            assert kept.take_idle(DeviceAddress(name, each.address), CONTROL) is None
    assert len(sessions) == 3 and not any(each.idle for each in sessions)


@pytest.fixture
def connected(
    kept: Channels, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DeviceConnection, Session]]:
    """Both ends of a control stream. The control unit cannot store parts."""
    monkeypatch.setattr(connection, "_ANSWER_S", 0.1)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with daemons(1) as (daemon,):
        device = DeviceAddress(NAMES[0], daemon.address)
        made = DeviceConnection(device, kept, threading.Event(), full, part_bytes=2**20)
        soon(lambda: bool(sessions))
        yield made, sessions[0]
        made.close()


def no_answer(own: DeviceConnection, other: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_end_round", lambda *_: None)
    own.release()


def unrequested_answer(own: DeviceConnection, other: Session, _: object) -> None:
    other.control.send(RELEASE)


def unstored_part(own: DeviceConnection, other: Session, _: object) -> None:
    other.control.send(Frame(FrameKind.PART, 0, 0, 0))
    soon(lambda: own.broken is not None)
    own.release()


@pytest.mark.parametrize("fault", [no_answer, unrequested_answer, unstored_part])
def test_a_stream_is_not_kept_after(
    kept: Channels,
    connected: tuple[DeviceConnection, Session],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[DeviceConnection, Session, pytest.MonkeyPatch], None],
) -> None:
    """The device would stay busy."""
    own, other = connected
    fault(own, other, monkeypatch)
    soon(lambda: own.control.over and other.control.over)
    assert own.broken is not None and kept.take_idle(own._device, CONTROL) is None


def test_a_part_under_way_arrives_before_the_command_to_release(
    connected: tuple[DeviceConnection, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, it would end the idle time of the device, which would be busy for all others."""
    (own, _), part = connected, Frame(FrameKind.PART, 0, 0, 0, (torch.zeros(2**15),))
    kinds, obey, released = list[FrameKind](), Session._obey, threading.Event()

    def noted(self: Session, frame: Frame) -> None:
        obey(self, frame)
        kinds.append(frame.kind)

    def made() -> Frame:
        released.wait(30)
        return part

    monkeypatch.setattr(Session, "_obey", noted)
    monkeypatch.setattr(connection, "_ANSWER_S", 30.0)
    own.control.send_later(made)
    own.control.send_later(lambda: part)
    soon(lambda: own.control._outbox.sizes() == (0, 0) and len(own.control._outbox._parts) == 1)
    own.release()
    released.set()
    soon(lambda: {*kinds} == {FrameKind.PART, FrameKind.RELEASE})
    assert kinds == [FrameKind.PART, FrameKind.RELEASE]


@pytest.mark.parametrize("revoked", ["jetson", "boss"])
def test_a_kept_stream_of_a_revoked_member_ends(tmp_path: Path, revoked: str) -> None:
    cluster = Cluster(tmp_path)
    members = {"jetson": cluster.member(), "boss": cluster.member("boss", Role.CONTROL_UNIT)}
    with (
        Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), members["jetson"]) as daemon,
        Channels(Dialer(members["boss"])) as channels,
    ):
        device = DeviceAddress("jetson", daemon.address)
        for expected in (True, False):
            stream = channels.stream(device, CONTROL, 2**20, threading.Event())
            channels.keep_idle(device, CONTROL, stream)
            if not expected:
                cluster.revoke(members[revoked].member)
            taken = channels.take_idle(device, CONTROL)
            assert (taken is stream) == expected == (not stream.over)
            stream.close()
            soon(lambda: daemon._session is None)


def idle_session(control: FrameStream) -> Session:
    def never(*arguments: Any) -> Any:
        raise AssertionError("not called")

    return Session(control, never, never, threading.Event(), threading.Event(), idle=True)


def test_a_displaced_session_obeys_no_command_that_has_already_arrived() -> None:
    control = FrameStream("the control unit", 2**20)
    control._incoming.append((Frame(FrameKind.LOAD, 0, 0, 0, (torch.zeros(1),)), 1))
    own = idle_session(control)
    assert own.displace()
    own.run()
    assert control.over and len(control._incoming) == 1


def test_a_daemon_serves_no_other_caller_before_a_displaced_session_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that reads nothing could keep any number of sessions, and their memory."""
    monkeypatch.setattr(server, "_GOODBYE_S", 0.01)
    control = FrameStream("the control unit", 2**20)
    with daemons(1) as (daemon,), Channels(INSECURE) as channels:
        daemon._session = stuck = idle_session(control)
        device = DeviceAddress(NAMES[0], daemon.address)
        with pytest.raises(BusyLinkError):
            channels.stream(device, CONTROL, 2**20, threading.Event())
        assert daemon._session is stuck and stuck._displaced


def test_a_busy_session_is_not_displaced() -> None:
    own = idle_session(FrameStream("the control unit", 2**20))
    own.idle = False
    assert not own.displace()


def test_a_session_that_is_idle_sends_no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait until the next round."""
    monkeypatch.setattr(daemon_session, "ALIVE_S", 0.001)
    control, done = FrameStream("the control unit", 2**20), threading.Event()
    own = idle_session(control)
    sends = threading.Thread(target=own._signs_of_life, args=(done,))
    sends.start()
    time.sleep(0.05)
    idle, own.idle = control.backlog(), False
    soon(lambda: control.backlog() != idle)
    done.set()
    sends.join()
    assert idle == (0, 0)


def test_the_answer_that_ends_a_round_follows_all_parts() -> None:
    """A part after it would count as one of the next round."""
    control, other = FrameStream("the control unit", 2**22), FrameStream("the device", 2**22)
    own = idle_session(control)
    part = Frame(FrameKind.PART, 0, 0, 0, (torch.zeros(2**18),))
    for _ in range(2):
        control.send_later(lambda: part)
    own._end_round(RELEASE)
    other.feed(control.outgoing(until=lambda: not control.backlog()[0] and control.all_made()))
    kinds = list[FrameKind]()
    with pytest.raises(LinkError):
        while True:
            kinds.append(other.receive(0).kind)
    assert kinds == [FrameKind.PART, FrameKind.PART, FrameKind.RELEASE]
