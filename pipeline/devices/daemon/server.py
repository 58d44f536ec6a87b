"""The daemon: it listens on a port and serves one control unit, and its segment's neighbours."""

import threading
import timeit
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import grpc
import psutil
import torch

from collapipe import __version__
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Role
from collapipe.credentials.verified_channel import Doorkeeper, require_loopback
from collapipe.errors import BusyLinkError, ConfigError, RefusedLinkError
from collapipe.process.allocator import return_large_blocks
from collapipe.process.torch_device import CPU
from collapipe.tensors import Tensors
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frozen_store import FrozenStore, default_folder
from collapipe.wire.streams.channels import DAEMON_OPTIONS, Channels, Dialer, serve_stream
from collapipe.wire.streams.data_port import DataPort
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.session import Session
from pipeline.devices.encoding import MOST_JSON_BYTES, as_json
from pipeline.devices.messages import (
    BRIEF,
    CONTROL,
    FRAME_SHARE,
    HOP,
    NEIGHBOUR,
    SERVICE,
    SESSION,
    SHARE,
    STATUS,
    DeviceStatus,
    SegmentDescription,
    place_of,
)

# at the same time: control unit, neighbours, devices of the segment, an ending epoch's, others
_STREAMS = 160
_MOST_FRAME_BYTES = 2**32
_GOODBYE_S = 2.0
_PRODUCTS = 3  # number of matrix products that measure speed
_CPU_SIDE, _GPU_SIDE = 384, 2048  # of the matrices; on a GPU a small product is mostly its launch
_MAY_CALL = {
    **dict.fromkeys((CONTROL, STATUS), (Role.CONTROL_UNIT,)),
    HOP: (Role.CONTROL_UNIT, Role.DEVICE),
}


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """The owner's settings of a device. ``model`` is a folder or hub id with frozen weights."""

    name: str
    listen: str
    memory_bytes: float
    torch_device: torch.device = CPU
    model: str | None = None


class Daemon:
    """Serves while the context is open; ``address`` has the port on which it listens.

    Raises ``ConfigError`` if it cannot listen on the address, or on a second port there.
    """

    def __init__(self, settings: DeviceSettings, credentials: Credentials | None) -> None:
        self._settings, self._credentials = settings, credentials
        self._channels = Channels(Dialer(credentials))  # to next devices
        kept = default_folder() / "devices" / quote(settings.name, safe="")
        self._frozen = FrozenStore(kept, settings.memory_bytes)
        self._found = dict[str, Tensors]()  # the last segment's: each round loads its blocks anew
        self._session: Session | None = None
        self._most = int(min(settings.memory_bytes / FRAME_SHARE, _MOST_FRAME_BYTES))
        self._work: threading.Thread | None = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._threads = futures.ThreadPoolExecutor(_STREAMS, thread_name_prefix="serve")
        self._server = grpc.server(
            self._threads, maximum_concurrent_rpcs=_STREAMS, options=DAEMON_OPTIONS
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._methods()),)
        )
        self.address = f"{settings.listen.rpartition(':')[0]}:{self._port()}"

    def __enter__(self) -> "Daemon":
        return_large_blocks()
        self._data = DataPort(*host_and_port(self.address))
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ask_to_leave()
        self._server.stop(_GOODBYE_S).wait()
        self._data.close()
        self._threads.shutdown(wait=False)
        self._channels.close()

    def leave(self) -> None:
        """Finish the current action, however long it takes, and report to the control unit."""
        self._ask_to_leave()
        if self._work is not None:
            self._work.join()

    def _ask_to_leave(self) -> None:
        self._leaving.set()
        if (session := self._session) is not None:
            session.arrived.set()

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handlers by their names in the service; with credentials they check the
        caller's certificate."""
        handlers = {
            CONTROL: grpc.stream_stream_rpc_method_handler(self._control),
            HOP: grpc.stream_stream_rpc_method_handler(self._hop),
            STATUS: grpc.unary_unary_rpc_method_handler(self._status),
        }
        if self._credentials is not None:
            for path, handler in handlers.items():
                handlers[path] = Doorkeeper(self._credentials, _MAY_CALL[path]).guard(handler)
        return {path.rpartition("/")[2]: handler for path, handler in handlers.items()}

    def _port(self) -> int:
        """Listen on the settings' address, and return the port."""
        wanted = self._settings.listen
        try:
            if self._credentials is None:
                require_loopback(wanted)
                return int(self._server.add_insecure_port(wanted))
            return int(self._server.add_secure_port(wanted, self._credentials.server()))
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {wanted}: cannot listen there: another program has the port, or the "
                "address is not this machine's; choose another"
            ) from error

    def _control(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        arrived = threading.Event()  # LOAD raises the frame limit to the size of parts
        stream = FrameStream(f"control unit {context.peer()}", 2 * MOST_JSON_BYTES, arrived)
        session = Session(stream, self._hold, self._dial, arrived, self._leaving)
        with self._occupied(session, context):
            work = threading.Thread(target=session.run, daemon=True)
            work.start()
            self._work = work  # started, so that ``leave`` can join it
            try:
                yield from serve_stream(stream, messages, context)
            finally:  # also if gRPC cancels the call
                work.join()

    def _hop(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata())
        session, name = self._session, metadata.get(NEIGHBOUR, "")
        if session is None or (place := place_of(name)) is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no segment here has such a session")
            return
        stage = "other device" if place[0] == SHARE else f"stage {place[0]}"
        stream = FrameStream(f"the {stage} ({context.peer()})", self._most, session.arrived)
        try:
            session.attach(name, metadata.get(SESSION, ""), stream)
        except RefusedLinkError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except BusyLinkError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        yield from serve_stream(stream, messages, context, self._data)

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        own, session = self._settings, self._session
        segment = session.held if session else None  # read once, the session's thread changes it
        held = segment.description if segment else None
        device = own.torch_device
        gpu = device.type == "cuda"  # with its own memory
        free = torch.cuda.mem_get_info(device)[0] if gpu else psutil.virtual_memory().available
        status = DeviceStatus(
            name=own.name,
            version=__version__,
            torch_version=torch.__version__,
            torch_device=str(device),
            threads=torch.get_num_threads(),
            memory_bytes=own.memory_bytes,
            free_bytes=float(free),
            flops_per_s=_flops_per_s(device) if session is None and request != BRIEF else None,
            expires=self._credentials.expires if self._credentials else None,
            busy=session is not None,
            unit=held.unit if held else None,
            span=held.span if held else None,
        )
        return as_json(status)

    @contextmanager
    def _occupied(self, session: Session, context: grpc.ServicerContext) -> Iterator[None]:
        """Reserve the daemon for this session; abort the call if another session is open."""
        with self._lock:
            taken = self._session
            if taken is None:
                self._session = session
        if taken is not None:
            held = taken.held  # read once, as the session's thread may change it
            unit = f" unit {held.description.unit}" if held else " another control unit"
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._settings.name} works for{unit}; wait, or take another device",
            )
        try:
            yield
        finally:
            with self._lock:
                self._session = None

    def _hold(self, description: SegmentDescription, earlier: HeldSegment | None) -> HeldSegment:
        own = self._settings
        return HeldSegment(
            *(description, own.memory_bytes, self._frozen, own.torch_device, earlier),
            *(own.model, self._found),
        )

    def _dial(self, neighbour: DeviceAddress, session: str, name: str) -> FrameStream:
        """Open the stream to another device, whose neighbour of that ``name`` this one is."""
        running = self._session
        assert running is not None
        held = running.held
        named = (each.address for each in held.description.peers) if held else ()
        self._channels.close(but=(neighbour, *named))  # a control unit may name any number
        metadata = (SESSION, session), (NEIGHBOUR, name)
        peer = f"{neighbour.name} ({neighbour.address})"
        return self._channels.stream(
            neighbour, HOP, self._most, running.arrived, metadata, peer, has_data=True
        )


def _flops_per_s(device: torch.device) -> float:
    """Measure the FLOP/s of a matrix product on ``device``, the best of a few."""
    side = _CPU_SIDE if device.type == "cpu" else _GPU_SIDE
    matrix = torch.rand(side, side).to(device)

    def multiply() -> None:
        torch.mm(matrix, matrix)[0, 0].item()  # waits for a GPU

    return 2 * side**3 / min(timeit.repeat(multiply, number=1, repeat=1 + _PRODUCTS))
