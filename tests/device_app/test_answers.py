"""What a daemon answers beside its segment, to whom, and how much of it."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from device_cluster import UNIT, Work, daemons, neighbours, plan_of

from collapipe import __version__
from collapipe.credentials.credentials import load
from collapipe.errors import LinkError, WireError
from collapipe.plan import Span
from collapipe.wire.dialing import Dialer, open_stream
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.inquiries import (
    PROBE,
    PROBE_FRAME_BYTES,
    TICKET,
    TIME_HOP,
    DeviceStatus,
    HopRequest,
    HopTimes,
)
from collapipe.wire.segments import DeviceAddress, as_json, from_json
from collapipe.wire.streams import FrameStream
from pipeline.remote.inquiries import ask_hop, ask_status, time_trips

OPEN = Dialer(None)
NOWHERE = DeviceAddress("device-9", "127.0.0.1:1")


@pytest.fixture(params=["insecure", "credentials"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Dialer, DeviceAddress, DeviceAddress]]:
    """A control unit's dialer and two devices."""
    folder = tmp_path / "own" if request.param == "credentials" else None
    with daemons(2, folder=folder) as there:
        dialer = Dialer(load(folder / "control-unit")) if folder else OPEN
        yield dialer, *neighbours(there)


def test_a_device_says_how_it_is(pair: tuple[Dialer, DeviceAddress, DeviceAddress]) -> None:
    dialer, device, _ = pair
    status = ask_status(dialer, device)
    assert (status.name, status.version) == ("device-0", __version__)
    assert (status.torch_version, status.torch_device) == (torch.__version__, "cpu")
    assert (status.memory_bytes, status.threads) == (1e9, torch.get_num_threads())
    assert status.free_bytes > 0 and status.flops_per_s is not None and status.flops_per_s > 0
    assert (status.busy, status.unit, status.span) == (False, None, None)
    if dialer.credentials is None:
        assert status.expires is None
    else:
        assert status.expires is not None
        assert timedelta(29) < status.expires - datetime.now(UTC) < timedelta(31)


@pytest.mark.parametrize(
    "lie",
    [
        {"expires": "2030-01-01T00:00:00"},  # in whose time zone?
        {"flops_per_s": math.nan},
        {"memory_bytes": math.inf},
        {"free_bytes": -1.0},
    ],
    ids=str,
)
def test_a_status_that_nobody_can_show_is_none(lie: dict[str, Any]) -> None:
    with daemons(1) as there:
        honest = json.loads(as_json(ask_status(OPEN, *neighbours(there))))
    assert from_json(DeviceStatus, json.dumps(honest).encode()).name == "device-0"
    with pytest.raises(WireError):
        from_json(DeviceStatus, json.dumps(honest | lie).encode())


@pytest.mark.parametrize(
    "trips", [[], [{"num_bytes": 1, "seconds": math.nan}], [{"num_bytes": 0, "seconds": 1.0}]]
)
def test_times_that_cannot_be_are_refused(trips: list[dict[str, float]]) -> None:
    with pytest.raises(WireError):
        from_json(HopTimes, json.dumps({"trips": trips}).encode())


def test_hops_are_timed_by_the_control_unit_and_by_devices(
    pair: tuple[Dialer, DeviceAddress, DeviceAddress],
) -> None:
    dialer, first, second = pair
    request = HopRequest(second, ask_status(dialer, second).ticket, (70_000, 1, 1_000_000), 2)
    between = ask_hop(dialer, first, request)
    own = HopRequest(first, ask_status(dialer, first).ticket, (1, 70_000), 1)
    for times, sizes in ((between, [1, 70_000, 1_000_000]), (time_trips(dialer, own), [1, 70_000])):
        assert [trip.num_bytes for trip in times.trips] == sizes
        assert all(trip.seconds > 0 for trip in times.trips)


def test_a_hop_that_is_not_there_is_named(
    pair: tuple[Dialer, DeviceAddress, DeviceAddress],
) -> None:
    dialer, first, second = pair
    with pytest.raises(LinkError, match="device-9"):
        ask_hop(dialer, first, HopRequest(NOWHERE, "", (1,), 1))
    request = HopRequest(second, ask_status(dialer, second).ticket, (1,), 1)
    assert ask_hop(dialer, first, request).trips  # nothing of the failed one is left


def test_who_does_not_answer_is_not_waited_for_long(tmp_path: Path) -> None:
    """Of a machine that is dead, and of a daemon that is stopped."""
    with daemons(1, folder=tmp_path / "own"), socket.create_server(("127.0.0.1", 0)) as silent:
        hung = DeviceAddress("device-0", f"127.0.0.1:{silent.getsockname()[1]}")
        own = load(tmp_path / "own/control-unit")
        for dialer in (Dialer(own, 0.5), Dialer(None, 0.5)):
            began = time.monotonic()
            with pytest.raises(LinkError, match="device-0"):
                ask_status(dialer, hung)
            assert time.monotonic() - began < 10


def test_a_ticket_is_good_once(pair: tuple[Dialer, DeviceAddress, DeviceAddress]) -> None:
    dialer, device, _ = pair
    request = HopRequest(device, ask_status(dialer, device).ticket, (1,), 1)
    time_trips(dialer, request)
    for spent in (request, HopRequest(device, "", (1,), 1)):
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            time_trips(dialer, spent)


def test_a_device_may_ask_nothing_and_probes_with_a_ticket_alone(tmp_path: Path) -> None:
    with daemons(2, folder=tmp_path / "own") as there:
        own, other = (
            Dialer(load(tmp_path / f"own/{name}")) for name in ("control-unit", "device-1")
        )
        device, _ = neighbours(there)
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            ask_status(other, device)
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            ask_hop(other, device, HopRequest(device, "", (1,), 1))
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            time_trips(other, HopRequest(device, "", (1,), 1))
        assert time_trips(other, HopRequest(device, ask_status(own, device).ticket, (1,), 1)).trips


def test_a_device_at_work_says_whose_blocks_and_is_not_probed() -> None:
    plan = plan_of(["device-0", "device-1"], (3, 1))
    with daemons(2) as there, Work().segments(plan, there):
        first, second = neighbours(there)
        status = ask_status(OPEN, second)
        assert (status.busy, status.unit, status.span) == (True, UNIT, Span(3, 1))
        assert status.flops_per_s is None
        request = HopRequest(second, status.ticket, (1,), 1)
        with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED"):
            time_trips(OPEN, request)
        with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED"):
            ask_hop(OPEN, first, request)


@pytest.mark.parametrize(
    ("sizes", "repeats"), [((), 1), ((0,), 1), ((PROBE_FRAME_BYTES + 1,), 1), ((1,), 101)]
)
def test_no_one_asks_for_more_than_the_bounds(sizes: tuple[int, ...], repeats: int) -> None:
    with pytest.raises(WireError):
        HopRequest(NOWHERE, "", sizes, repeats)


def test_a_device_checks_what_it_is_asked() -> None:
    big = '{"target":{"name":"a","address":"b"},"ticket":"","sizes":[99999999999],"repeats":1}'
    with daemons(1) as (daemon,):
        channel = OPEN.channel("device-0", daemon.address)
        for asked in (b"", b"{}", big.encode()):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(TIME_HOP)(asked, timeout=20)
        channel.close()


def test_one_probe_at_a_time() -> None:
    with daemons(2) as there:
        first, second = neighbours(there)
        held = probe(first)
        with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED"):
            probe(first)
        with pytest.raises(LinkError, match="RESOURCE_EXHAUSTED"):  # nor does it probe others
            ask_hop(OPEN, first, HopRequest(second, ask_status(OPEN, second).ticket, (1,), 1))
        assert ask_status(OPEN, first).flops_per_s is None
        held.close()
        assert free_again(first)


def test_a_probe_ends_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_app.answers.PROBE_BYTES", 2_000_000)
    with daemons(1) as there:
        (device,) = neighbours(there)
        stream = probe(device)
        for _ in range(9):
            stream.send(message(1_000_000))
        with pytest.raises((LinkError, WireError)):
            for _ in range(9):
                stream.receive(20)
        assert free_again(device)


def test_a_probe_ends_at_a_message_beyond_the_bound() -> None:
    with daemons(1) as there:
        (device,) = neighbours(there)
        stream = probe(device)
        stream.send(message(3 * PROBE_FRAME_BYTES))
        with pytest.raises((LinkError, WireError)):
            stream.receive(20)
        assert free_again(device)


def test_a_silent_probe_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_app.answers.PROBE_S", 0.1)
    with daemons(1) as there:
        (device,) = neighbours(there)
        with pytest.raises((LinkError, WireError)):
            probe(device).receive(20)
        assert free_again(device)


def test_a_slow_link_is_not_given_more_than_it_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are always tried; what would last too long is left out."""
    send = FrameStream.send

    def slow(stream: FrameStream, frame: Frame) -> None:
        if frame.kind == FrameKind.ACTIVATION:
            time.sleep(frame.tensors[0].numel() * 1e-6)
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow)
    monkeypatch.setattr("pipeline.remote.inquiries.PROBE_S", 3.0)
    with daemons(1) as there:
        (device,) = neighbours(there)
        request = HopRequest(device, ask_status(OPEN, device).ticket, (1, 200_000, 8_000_000), 3)
        assert [trip.num_bytes for trip in time_trips(OPEN, request).trips] == [1, 200_000]


def probe(device: DeviceAddress) -> FrameStream:
    """A stream as a caller opens it that keeps to no bounds."""
    channel = OPEN.channel(device.name, device.address)
    said = ((TICKET, ask_status(OPEN, device).ticket),)
    return open_stream(channel, PROBE, device.name, 2**30, threading.Event(), said)


def message(size: int) -> Frame:
    """Of so many bytes."""
    return Frame(FrameKind.ACTIVATION, 0, 0, 0, (torch.zeros(size, dtype=torch.uint8),))


def free_again(device: DeviceAddress) -> bool:
    """Whether the device can be probed, sooner or later."""
    for _ in range(100):
        try:
            probe(device).close()
            return True
        except LinkError:
            time.sleep(0.1)
    return False
