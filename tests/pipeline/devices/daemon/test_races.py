"""Races between a daemon's session and other threads."""

import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import torch
from device_cluster import INSECURE, daemons
from new_threads import product

from collapipe.errors import LinkError, RefusedLinkError
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import channels
from collapipe.wire.streams.channels import Dialer, open_stream
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.daemon import server
from pipeline.devices.daemon.session import Session
from pipeline.devices.messages import BEFORE, CONTROL, Peer, neighbour_name, secret_for

NAME = neighbour_name(BEFORE, 0)
DESCRIPTION = SimpleNamespace(
    peers=[],
    neighbours={NAME},
    session="earlier",
    unit=3,
    most_bytes_from=lambda name, most: most,
)
HELD: Any = SimpleNamespace(description=DESCRIPTION)


class Releasing:
    """A session that releases its segment after the first read."""

    def __init__(self) -> None:
        self._held = [HELD, None]

    @property
    def held(self) -> Any:
        return self._held.pop(0)


class Aborting:
    """A call whose abort raises ``LinkError``."""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise LinkError(f"{code.name}: {details}")


def test_a_daemon_refuses_others_while_its_session_releases_the_segment() -> None:
    with daemons(1) as (daemon,):
        daemon._session = Releasing()  # type: ignore[assignment]
        occupied = daemon._occupied(session(), Aborting())  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="works for unit 3"), occupied:
            pass
        daemon._session = None


def session() -> Session:
    """A session that holds a segment."""

    def never(*arguments: Any) -> Any:
        raise AssertionError("not called")

    own = threading.Event(), threading.Event()
    return Session(FrameStream("the control unit", 100), never, never, *own, held=HELD)


def test_a_session_computes_with_the_threads_of_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its first products would use all cores, and differ in their last bits."""
    found = list[torch.Tensor]()

    def waited(*_: Any, **__: Any) -> None:
        found.append(product())
        raise LinkError("the control unit is gone")

    monkeypatch.setattr(Session, "_wait", waited)
    thread = threading.Thread(target=session().run)
    thread.start()
    thread.join()
    assert torch.equal(*found, product())


class Hooked(dict[str, FrameStream]):
    """Neighbours; another thread tries to release them between look-up and insertion."""

    def __init__(self, owner: Session) -> None:
        super().__init__()
        self.other = threading.Thread(target=owner._release, daemon=True)

    def setdefault(self, name: str, stream: FrameStream) -> FrameStream:  # type: ignore[override]
        self.other.start()
        self.other.join(0.2)  # it must wait for this thread
        return super().setdefault(name, stream)


def test_a_neighbour_attached_during_the_release_is_closed() -> None:
    own, stream = session(), FrameStream("a neighbour", 100)
    own.neighbours = hooked = Hooked(own)
    own.attach(NAME, secret_for("earlier", NAME), stream)
    hooked.other.join(60)
    assert stream.over and not own.neighbours
    with pytest.raises(RefusedLinkError):
        own.attach(NAME, secret_for("earlier", NAME), stream)


def test_a_channel_to_a_neighbour_that_refuses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def refuse(*arguments: Any) -> FrameStream:
        raise LinkError("refused")

    channel = SimpleNamespace(close=closed.set)
    monkeypatch.setattr(channels, "open_stream", refuse)
    monkeypatch.setattr(Dialer, "pinned", lambda *arguments: (channel, None))
    with daemons(1) as (daemon,):
        daemon._session = session()
        with pytest.raises(LinkError):
            daemon._dial(DeviceAddress("device-1", "127.0.0.1:1"), "secret", NAME)
        daemon._session = None
    assert closed.is_set()


class Scarce(threading.Thread):
    """A daemon's thread; the one that receives a control unit's messages cannot be started."""

    def start(self) -> None:
        if self.name.startswith("from control unit"):
            raise RuntimeError("can't start new thread")
        super().start()


def test_a_daemon_is_free_again_after_a_thread_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "threading", SimpleNamespace(Thread=Scarce))
    with daemons(1) as (daemon,), INSECURE.channel("device-0", daemon.address) as channel:
        with suppress(LinkError):
            open_stream(channel, CONTROL, "device-0", 2**20, threading.Event())
        until = time.monotonic() + 60
        while daemon._session is not None:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_daemon_may_leave_while_a_session_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = list[RuntimeError]()

    class Late(threading.Thread):
        def start(self) -> None:
            try:
                daemon.leave()
            except RuntimeError as error:
                errors.append(error)
            super().start()

    with daemons(1) as (daemon,), INSECURE.channel("device-0", daemon.address) as channel:
        threads = SimpleNamespace(Thread=Late, Event=threading.Event)
        monkeypatch.setattr(server, "threading", threads)
        stream = open_stream(channel, CONTROL, "device-0", 2**20, threading.Event())
        while stream.receive(60).kind != FrameKind.FAILED:
            pass  # a sign of life
    assert not errors


def test_a_session_that_cannot_send_signs_of_life_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=RuntimeError("can't start new thread"))
    own, threads = session(), SimpleNamespace(Thread=failing, Event=threading.Event)
    monkeypatch.setattr("pipeline.devices.daemon.session.threading", threads)
    with pytest.raises(RuntimeError):
        own.run()
    assert own.control.over


def test_a_leaving_session_does_not_name_the_plan_before_a_failed_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    span = SimpleNamespace(first=0, stop=1)
    held = Mock(wanted=BEFORE, part_bytes=0)
    held.description = Mock(unit=0, round=3, stage=0, num_segments=1, span=span)
    own, description = session(), Mock(return_value=held.description)
    monkeypatch.setattr("pipeline.devices.daemon.session.unpacked", description)
    own.hold = Mock(side_effect=[held, MemoryError])
    own.control = control = Mock(max_bytes=0, backlog=lambda: (0, 0))
    control.waiting.return_value = False
    for epoch in (1, 2):
        own._obey(Frame(FrameKind.LOAD, 3, 0, 0, (torch.zeros(1),), epoch))
    own.leaving.set()
    own.run()
    frames = [call.args[0] for call in control.send.call_args_list]
    assert [each.epoch for each in frames if each.kind == FrameKind.FAILED] == [2, 0]


def test_a_close_callback_runs_at_once_on_a_closed_stream() -> None:
    stream, closed = FrameStream("a neighbour", 100), threading.Event()
    stream.close()
    stream.on_close(closed.set)
    assert closed.is_set()


def test_a_device_opens_streams_to_all_its_peers() -> None:
    """Otherwise another device would start without its stream."""
    own, dialled = session(), list[str]()

    def dial(address: DeviceAddress, secret: str, name: str) -> FrameStream:
        dialled.append(address.name)
        return FrameStream(address.name, 100)

    names = ["share-1", "share-2", "behind-0"]
    peers = [Peer(DeviceAddress(name, "127.0.0.1:1"), name, "secret") for name in names]
    known: Any = SimpleNamespace(
        session="s",
        peers=peers,
        member=0,
        neighbours={*names},
        most_bytes_from=lambda name, most: most,
    )
    own.held = SimpleNamespace(description=known, part_bytes=0, built=False)  # type: ignore[assignment]
    own.dial = dial
    own._held = lambda frame: own.held  # type: ignore[assignment, return-value]
    own._open(Frame(FrameKind.OPEN, 0, 0, 0, ()))
    assert dialled == [*own.neighbours] == names
