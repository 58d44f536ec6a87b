"""Ask devices for their status, and time messages to a neighbour and back."""

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

_HEADER_BYTES = 1024  # an upper bound of a frame's header


def ask_status(dialer: Dialer, device: DeviceAddress) -> DeviceStatus:
    """Ask for the status of ``device``. Raises ``LinkError`` if it cannot be reached, does not
    answer within the dialer's timeout, or sends an invalid answer."""
    answer = _ask(dialer, device, STATUS, b"", dialer.timeout_s)
    try:
        return from_json(DeviceStatus, answer)
    except WireError as error:
        raise LinkError(
            f"{device.name} at {device.address}: {error}; check that its version is the same"
        ) from error


def ask_hop(dialer: Dialer, source: DeviceAddress, request: HopRequest) -> HopTimes:
    """Let the device ``source`` run ``time_trips``. Raises like ``ask_status``."""
    most_s = 2 * CONNECT_S + PROBE_S + dialer.timeout_s
    return from_json(HopTimes, _ask(dialer, source, TIME_HOP, as_json(request), most_s))


def time_trips(dialer: Dialer, request: HopRequest) -> HopTimes:
    """Time messages to a neighbour, which returns them, as with activations and gradients.

    Returns the median of each size without its first message. Raises ``LinkError`` if the neighbour
    cannot be reached or does not answer in time.
    """
    target, limit = request.target, PROBE_FRAME_BYTES + _HEADER_BYTES
    call = PROBE, f"{target.name} ({target.address})", limit, threading.Event()
    with (
        dialer.channel(target.name, target.address) as channel,
        closing(open_stream(channel, *call, ((TICKET, request.ticket),))) as stream,
    ):
        return HopTimes(_trips(stream, request))


def _trips(stream: FrameStream, request: HopRequest) -> tuple[Trip, ...]:
    """Time trips of ascending sizes until the next trip is not expected to end in time."""
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
    """Whether another trip is expected to end too late. The first trips of two sizes are always
    tried."""
    if not taken and len(found) < 2:
        return False
    expected_s = taken[-1] if taken else found[-1].seconds * size / found[-1].num_bytes
    return time.monotonic() + expected_s > deadline


def _trip(stream: FrameStream, size: int, deadline: float) -> float:
    """Seconds of one message, there and back."""
    message = torch.randint(256, (size,), dtype=torch.uint8)  # random, so that no link compresses
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
    """Send one request and return the answer. Raises ``LinkError`` if the call fails."""
    with dialer.channel(device.name, device.address) as channel:
        try:
            answer: bytes = channel.unary_unary(method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            why = f"{reason(error)}{dialer.hint}"
            raise LinkError(f"{device.name} at {device.address}: {why}") from error
    return answer
