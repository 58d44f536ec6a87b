"""A daemon's answers outside of rounds: its status, echoes of probes, and timed hops."""

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc
import psutil
import torch

import collapipe
from collapipe.credentials.credentials import Credentials
from collapipe.errors import CollaPipeError, LinkError, WireError
from collapipe.wire.dialing import Dialer
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.inquiries import PROBE_BYTES, PROBE_S, TICKET, DeviceStatus, HopRequest
from collapipe.wire.segments import as_json, from_json
from collapipe.wire.streams import FrameStream
from device_app.session import Session
from pipeline.remote.inquiries import time_trips

_TICKETS = 16  # number of valid tickets at the same time
_SIDE, _PRODUCTS = 384, 3  # side of the matrices, and number of their products, that measure speed


class Answers:
    """Answers questions for one daemon; ``session()`` is its current session, if any.

    Only one probe, from or to this device, runs at a time, and none while a control unit uses the
    device.
    """

    def __init__(
        self,
        name: str,
        memory_bytes: float,
        credentials: Credentials | None,
        session: Callable[[], Session | None],
    ) -> None:
        self._name, self._memory_bytes, self._session = name, memory_bytes, session
        self._credentials = credentials
        self._probing = threading.Lock()
        self._tickets = deque[str](maxlen=_TICKETS)

    def status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Return the ``DeviceStatus``, with a ticket for one probe."""
        session = self._session()
        segment = session.held if session else None
        held = segment.description if segment else None
        ticket = secrets.token_hex(16)
        self._tickets.append(ticket)
        status = DeviceStatus(
            name=self._name,
            version=collapipe.__version__,
            torch_version=torch.__version__,
            torch_device=str(torch.get_default_device()),
            threads=torch.get_num_threads(),
            memory_bytes=self._memory_bytes,
            free_bytes=float(psutil.virtual_memory().available),
            flops_per_s=self._speed() if session is None else None,
            expires=self._credentials.expires if self._credentials else None,
            busy=session is not None,
            unit=held.unit if held else None,
            span=held.span if held else None,
            ticket=ticket,
        )
        return as_json(status)

    def time_hop(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Time the hop of a ``HopRequest``. Returns ``HopTimes``."""
        with self._alone(context):
            try:
                dialer = Dialer(self._credentials)
                return as_json(time_trips(dialer, from_json(HopRequest, request)))
            except CollaPipeError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
                raise  # abort does not return

    @contextmanager
    def probed(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Check that the caller of PROBE has a ticket, and exclude other probes meanwhile."""
        ticket = dict(context.invocation_metadata()).get(TICKET, "")
        try:
            self._tickets.remove(ticket)
        except ValueError:
            _refuse(context, grpc.StatusCode.UNAUTHENTICATED, "no such ticket; ask for the status")
        with self._alone(context):
            yield

    @contextmanager
    def _alone(self, context: grpc.ServicerContext) -> Iterator[None]:
        busy = grpc.StatusCode.RESOURCE_EXHAUSTED
        if self._session() is not None:
            _refuse(context, busy, f"{self._name} works for a control unit; ask later")
        if not self._probing.acquire(blocking=False):
            _refuse(context, busy, f"{self._name} has a probe under way; ask later")
        try:
            yield
        finally:
            self._probing.release()

    def _speed(self) -> float | None:
        """Measure the FLOP/s of a matrix product, the best of a few; None if a probe is running."""
        if not self._probing.acquire(blocking=False):
            return None
        try:
            matrix = torch.rand(_SIDE, _SIDE)
            return max(_product_flops(matrix) for _ in range(1 + _PRODUCTS))
        finally:
            self._probing.release()


def echo(stream: FrameStream) -> None:
    """Send received tensors back until the caller closes the stream, ``PROBE_BYTES`` have arrived
    or the time is up."""
    deadline = time.monotonic() + 2 * PROBE_S  # the caller ends before, by its own clock
    try:
        while stream.bytes_in <= PROBE_BYTES:
            frame = stream.receive(max(deadline - time.monotonic(), 0.0))
            stream.send(Frame(FrameKind.GRADIENT, 0, 0, 0, frame.tensors))
    except (LinkError, WireError, queue.Empty):
        pass
    finally:
        stream.close()


def _product_flops(matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(matrix, matrix)
    return 2 * _SIDE**3 / (time.perf_counter() - began)


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, why: str) -> NoReturn:
    context.abort(code, why)
    raise AssertionError("abort does not return")
