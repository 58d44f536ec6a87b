"""Ask devices how they are; time messages to a neighbour and back."""

import queue
import threading
import time
from contextlib import closing
from statistics import median

import grpc
import torch

from collapipe.errors import LinkError, WireError
from collapipe.wire.dialing import CONNECT_S, Dialer, open_stream
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.inquiries import (
    PROBE,
    PROBE_BYTES,
    PROBE_FRAME_BYTES,
    PROBE_S,
    STATUS,
    TICKET,
    TIME_HOP,
    DeviceStatus,
    HopRequest,
    HopTimes,
    Trip,
)
from collapipe.wire.segments import DeviceAddress, as_json, from_json
from collapipe.wire.streams import FrameStream, reason

_HEADER_BYTES = 1024  # of a frame, and more


def ask_status(dialer: Dialer, device: DeviceAddress) -> DeviceStatus:
    """How ``device`` is. Raises ``LinkError`` where it cannot be asked or does not answer within
    the dialer's time, or answers what is none."""
    answer = _ask(dialer, device, STATUS, b"", dialer.timeout_s)
    try:
        return from_json(DeviceStatus, answer)
    except WireError as error:
        raise LinkError(
            f"{device.name} at {device.address}: {error}; is its version ours?"
        ) from error


def ask_hop(dialer: Dialer, source: DeviceAddress, request: HopRequest) -> HopTimes:
    """``time_trips`` as ``source`` does it. Raises as ``ask_status`` does."""
    most_s = 2 * CONNECT_S + PROBE_S + dialer.timeout_s
    return from_json(HopTimes, _ask(dialer, source, TIME_HOP, as_json(request), most_s))


def time_trips(dialer: Dialer, request: HopRequest) -> HopTimes:
    """Send messages to a neighbour, which sends them back, as activations go and gradients come.

    Medians, without the first of each size. Raises ``LinkError`` where that is not possible.
    """
    target, limit = request.target, PROBE_FRAME_BYTES + _HEADER_BYTES
    call = PROBE, f"{target.name} ({target.address})", limit, threading.Event()
    with (
        dialer.channel(target.name, target.address) as channel,
        closing(open_stream(channel, *call, ((TICKET, request.ticket),))) as stream,
    ):
        return HopTimes(_trips(stream, request))


def _trips(stream: FrameStream, request: HopRequest) -> tuple[Trip, ...]:
    """Sizes in their order, as long as the next trip is expected to end in time."""
    deadline, left = time.monotonic() + PROBE_S, PROBE_BYTES // 2
    found = list[Trip]()
    for size in sorted(set(request.sizes)):
        taken = list[float]()
        while len(taken) <= request.repeats and size <= left:
            if _late(found, size, taken, deadline):
                break
            taken.append(_trip(stream, size, deadline))
            left -= size
        if taken:
            found.append(Trip(size, median(taken[1:] or taken)))
    return tuple(found)


def _late(found: list[Trip], size: int, taken: list[float], deadline: float) -> bool:
    """Whether another trip would not end in time; a first one of two sizes is always tried."""
    if not taken and len(found) < 2:
        return False
    expected_s = taken[-1] if taken else found[-1].seconds * size / found[-1].num_bytes
    return time.monotonic() + expected_s > deadline


def _trip(stream: FrameStream, size: int, deadline: float) -> float:
    """Seconds of one message, there and back."""
    message = torch.randint(256, (size,), dtype=torch.uint8)  # which no link can compress
    began = time.perf_counter()
    stream.send(Frame(FrameKind.ACTIVATION, 0, 0, 0, (message,)))
    try:
        stream.receive(max(deadline - time.monotonic(), 0.0))
    except queue.Empty as error:
        raise LinkError(
            f"{stream.peer}: {size:,} bytes did not come back within {PROBE_S:.0f} s"
        ) from error
    return time.perf_counter() - began


def _ask(
    dialer: Dialer, device: DeviceAddress, method: str, request: bytes, timeout_s: float
) -> bytes:
    """The answer to one request."""
    with dialer.channel(device.name, device.address) as channel:
        try:
            answer: bytes = channel.unary_unary(method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            why = f"{reason(error)}{dialer.hint}"
            raise LinkError(f"{device.name} at {device.address}: {why}") from error
    return answer
