"""When a control unit treats a device as lost."""

import math
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from collapipe.errors import LinkError, StageError, WireError
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit.connection import DeviceConnection

PART = Frame(FrameKind.PART, 1, 2, 3, (torch.zeros(1000, dtype=torch.uint8),))


def parts(count: int) -> Iterator[bytes]:
    sender = FrameStream("a device", 2**20)
    for _ in range(count):
        sender.send(PART)
    messages = sender.outgoing()
    return (next(messages) for _ in range(count))


def test_a_slow_local_disk_does_not_make_a_device_silent() -> None:
    """The device's signs of life wait in the queue after parts that are not stored yet."""
    stream, arrived, stored = FrameStream("a device", 1500), threading.Event(), threading.Event()
    channels = Mock(stream=lambda *_, **__: stream)
    device = DeviceAddress("a", "127.0.0.1:1")
    connection = DeviceConnection(device, channels, arrived, lambda *_: stored.wait(), 1500)
    feeding = threading.Thread(target=stream.feed, args=(parts(3),), daemon=True)
    feeding.start()  # of three parts, one is being stored, one waits, and one exceeds the buffer
    while stream.silent_s:
        pass
    stream.last_received_s -= 60
    connection.check(hung_s=1.0)
    until = time.monotonic() + 30
    while not connection._storing:
        assert time.monotonic() < until
    stream.last_moved_s -= 60
    connection._reported_s -= 60
    assert time.monotonic() - connection.moved_s < 30  # the device is not to blame
    stored.set()
    feeding.join(5)
    connection.broken = None  # the stream has ended
    stream.last_received_s -= 60
    with pytest.raises(StageError, match="no sign of life for 6"):
        connection.check(hung_s=1.0)


def silent_device() -> DeviceConnection:
    stream = Mock(last_moved_s=0.0, receive=Mock(side_effect=LinkError("")))
    channels = Mock(stream=lambda *_, **__: stream)
    device = DeviceAddress("a", "127.0.0.1:1")
    return DeviceConnection(device, channels, threading.Event(), Mock(), 1500)


@pytest.mark.parametrize("clock_s", [math.nan, 1e300, -1e10])
def test_an_impossible_clock_is_refused(clock_s: float) -> None:
    """The times of a report would be beyond its bounds, so the unit would lose its round."""
    answer = Frame(FrameKind.CLOCK, 1, 0, 0, (torch.tensor(clock_s, dtype=torch.float64),))
    with pytest.raises(WireError):
        silent_device()._handle(answer)


def test_a_device_reports_since_when_it_waits_and_for_which_action() -> None:
    connection = silent_device()
    times = torch.tensor([0.0, 7.0, 3.0]).double()
    connection._reported_s = 0.0
    connection._handle(Frame(FrameKind.ALIVE, 1, 2, 3, (times,)))
    assert connection.progress[1] == 3 and connection.busy_s == 0.0
    assert time.monotonic() - connection.moved_s >= 7.0
    for invalid in (
        times[:1],
        times * torch.nan,
        Mock(numel=lambda: 10**7, shape=(10**7,), tolist=None),
    ):
        with pytest.raises(WireError, match="ALIVE"):
            connection._handle(Frame(FrameKind.ALIVE, 1, 2, 3, (invalid,)))


def test_an_invalid_certificate_is_named_as_the_cause_of_a_broken_stream() -> None:
    """The device ends the stream with 'CANCELLED' if the control unit's certificate has expired."""
    connection = silent_device()
    connection.broken = LinkError("a: CANCELLED")
    with pytest.raises(StageError, match="CANCELLED"):
        connection.check(hung_s=1.0)
    connection._channels.check = Mock(side_effect=WireError("the certificate expired"))
    with pytest.raises(StageError, match="the certificate expired"):
        connection.check(hung_s=1.0)
