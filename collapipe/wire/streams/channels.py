"""Open a stream of frames to another machine, or serve one to a caller."""

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc

from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.verified_channel import cause, dial, require_loopback
from collapipe.errors import (
    BrokenLinkError,
    BusyLinkError,
    LinkError,
    RefusedLinkError,
    WireError,
)
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.data_port import DataPort, DataRoute
from collapipe.wire.streams.frame_stream import ACCEPTED, FrameStream
from collapipe.wire.streams.lanes import Lane
from collapipe.wire.streams.pieces import PIECE_BYTES

CONNECT_S = 5.0  # for a handshake, on a busy machine too
_CALL_ENDS_S = 2.0  # after its data connection
_MESSAGE_BYTES = PIECE_BYTES + 1024
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a unit dials its server directly, even if HTTP uses a proxy
    ("grpc.keepalive_time_ms", 2000),
    # A slow link may take this long to acknowledge data; silence is noticed by frames.
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),  # a busy machine sends delayed pings in a burst
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # also the limit for connecting
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),  # silent connections end
)
# Else gRPC lets a sender be up to 20 MB ahead of its reader, which take memory and delay signs of
# life on a slow link. At a round trip of 4 ms a stream still carries 80 MB/s.
_NEAR = (("grpc.http2.bdp_probe", 0),)
DEVICE_OPTIONS = (*CHANNEL_OPTIONS, *_NEAR)
DAEMON_OPTIONS = (*SERVER_OPTIONS, *_NEAR)


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens channels with ``credentials``. None: without encryption, on loopback only.

    A handshake may take ``timeout_s`` seconds.
    """

    credentials: Credentials | None
    timeout_s: float = CONNECT_S

    def channel(self, device: str, address: str) -> grpc.Channel:
        """Open a channel to ``device``.

        Raises ``LinkError`` if another device is at ``address``. Raises ``ConfigError`` if the
        channel would be unencrypted and ``address`` is not on this machine.
        """
        return self.pinned(device, address)[0]

    def pinned(self, device: str, address: str) -> tuple[grpc.Channel, bytes | None]:
        """Open a channel as ``channel`` does. Also returns the certificate (PEM) that it trusts,
        None without credentials."""
        if self.credentials is not None:
            return dial(self.credentials, address, device, self.timeout_s, DEVICE_OPTIONS)
        require_loopback(address)
        return grpc.insecure_channel(address, options=DEVICE_OPTIONS), None

    def fault(self, device: str, address: str) -> str | None:
        """Return why the device does not answer in time; None if it answers."""
        try:
            socket.create_connection(host_and_port(address), self.timeout_s).close()
            with self.channel(device, address) as channel:
                grpc.channel_ready_future(channel).result(timeout=self.timeout_s)
        except LinkError as error:
            return str(error)
        except grpc.FutureTimeoutError:
            return f"device {device} at {address}: timed out{self.hint}"
        except OSError as error:
            return f"device {device} at {address}: {cause(error)}"
        return None

    @property
    def hint(self) -> str:
        """A hint for the error message if a reachable device does not answer."""
        return "" if self.credentials else "; without credentials only --insecure devices answer"


class Channels:
    """Channels that stay open for the next streams, one to each device and method, until the
    context ends.

    A channel is dialled when its first stream is opened, and again if it turns out to be broken. It
    is not used any more once the device's certificate is revoked or has expired.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._open: dict[tuple[DeviceAddress, str], tuple[grpc.Channel, bytes | None]] = {}
        self._routes = dict[DeviceAddress, DataRoute]()

    def __enter__(self) -> "Channels":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(
        self,
        device: DeviceAddress,
        method: str,
        max_bytes: int,
        arrived: threading.Event,
        metadata: Sequence[tuple[str, str]] = (),
        peer: str | None = None,
        has_data: bool = False,
    ) -> FrameStream:
        """Open a stream to ``device``, which is named ``peer`` in errors, as ``open_stream`` does.

        If the method ``has_data``, the device offers a data connection for its messages.

        Raises ``LinkError`` if the device cannot be reached or does not accept it.
        """
        until, dialer = time.monotonic() + self._dialer.timeout_s, self._dialer
        kept, how = (device, method) in self._open, (peer or device.name, max_bytes, arrived)
        route = self._route(device) if has_data else None
        while True:
            try:
                return open_stream(
                    self._channel(device, method, dialer), method, *how, metadata, route
                )
            except (BusyLinkError, RefusedLinkError):  # over a channel that works
                raise
            except LinkError as error:
                self._forget(device, method)
                left_s = until - time.monotonic()
                if not (kept and isinstance(error, BrokenLinkError) and left_s > 0):
                    raise
            kept, dialer = False, replace(self._dialer, timeout_s=left_s)

    def check(self, device: DeviceAddress, method: str) -> None:
        """Raise ``WireError`` if the certificate that an open channel trusts, or this machine's, is
        not valid now."""
        _, certificate = self._open.get((device, method), (None, None))
        if (own := self._dialer.credentials) is not None:
            for each in filter(None, (own.certificate, certificate)):
                own.check(each)

    def drop(self, device: DeviceAddress) -> None:
        """Close all channels to a device, and end their streams."""
        for known, method in [*self._open]:
            if known == device:
                self._forget(device, method)

    def close(self, but: Collection[DeviceAddress] = ()) -> None:
        """Close all channels, except those to the devices ``but``."""
        for device, method in [*self._open]:
            if device not in but:
                self._forget(device, method)
        for device in self._routes.keys() - {*but}:
            del self._routes[device]

    def _route(self, device: DeviceAddress) -> DataRoute:
        made = DataRoute(device.name, host_and_port(device.address)[0])
        return self._routes.setdefault(device, made)

    def _forget(self, device: DeviceAddress, method: str) -> None:
        if (kept := self._open.pop((device, method), None)) is not None:
            kept[0].close()

    def _channel(self, device: DeviceAddress, method: str, dialer: Dialer) -> grpc.Channel:
        key = device, method
        try:
            self.check(device, method)
        except WireError:
            self._forget(device, method)
        if key not in self._open:
            self._open[key] = dialer.pinned(device.name, device.address)
        return self._open[key][0]


def open_stream(
    channel: grpc.Channel,
    method: str,
    peer: str,
    max_bytes: int,
    arrived: threading.Event,
    metadata: Sequence[tuple[str, str]] = (),
    route: DataRoute | None = None,
) -> FrameStream:
    """Open a stream and wait until the peer accepts it with ``serve_stream``. With a ``route``, the
    peer offers a data connection.

    Raises ``LinkError`` if the peer does not.
    """
    stream = FrameStream(peer, max_bytes, arrived)
    if route is None:
        start_stream(stream, channel, method, metadata)
    else:
        _start_with_data(stream, channel, method, metadata, route)
    try:
        # gRPC's initial metadata would say so too, but may never arrive if the call ends
        stream.wait_until_accepted(CONNECT_S)
    except WireError as error:
        stream.close()
        raise LinkError(str(error)) from error
    except LinkError:
        stream.close()
        raise
    return stream


def start_stream(
    stream: FrameStream, channel: grpc.Channel, method: str, metadata: Sequence[tuple[str, str]]
) -> grpc.Call:
    """Open a stream; it ends if the peer does not accept it."""
    call = channel.stream_stream(method)(stream.outgoing(), metadata=tuple(metadata))
    stream.on_close(call.cancel)
    _start(stream.feed_and_close, call, f"from {stream.peer}")
    return call


def _start_with_data(
    stream: FrameStream,
    channel: grpc.Channel,
    method: str,
    metadata: Sequence[tuple[str, str]],
    route: DataRoute,
) -> None:
    lane, ended = Lane(), threading.Event()
    outgoing = lane.caller_messages(stream)
    call = channel.stream_stream(method)(outgoing, metadata=tuple(metadata))

    def has_ended() -> None:
        ended.set()
        lane.close()

    def answers() -> Iterator[bytes | memoryview]:
        with suppress(OSError):  # the call has the cause, if it ends too
            yield from lane.to_caller(call, lambda offer: route.connect(offer, lambda: stream.over))
        if lane.connection() is None:
            return
        if not ended.wait(_CALL_ENDS_S) or call.code() == grpc.StatusCode.ABORTED:
            route.stay_on_grpc("its data connection broke")
        if not ended.is_set():
            raise ConnectionError("the data connection broke")
        yield from call

    stream.on_close(call.cancel)
    _start(stream.feed_and_close, answers(), f"from {stream.peer}")
    if not call.add_callback(has_ended):
        has_ended()


def accept_stream(
    stream: FrameStream, messages: Iterator[bytes], context: grpc.ServicerContext
) -> None:
    """Receive the caller's messages in a thread; the handler must yield ``stream.outgoing()``. It
    may answer an invalid frame, and must close the stream."""
    _accept(stream, stream.feed, messages, context)


def serve_stream(
    stream: FrameStream,
    messages: Iterator[bytes],
    context: grpc.ServicerContext,
    port: DataPort | None = None,
) -> Iterator[bytes]:
    """Receive the caller's messages, and yield the replies; the first one accepts the stream, and
    offers a data connection on the ``port``. It ends with the caller's messages, or at an invalid
    frame."""
    if port is None:
        _accept(stream, stream.feed_and_close, messages, context)
        yield ACCEPTED
        yield from stream.outgoing()
        return
    with port.offered() as (offer, made):
        lane = Lane()
        stream.on_close(lane.close)
        _accept(stream, stream.feed_and_close, lane.to_device(messages, made), context)
        yield from lane.device_messages(stream, offer)
        if lane.broke and context.is_active():
            context.abort(grpc.StatusCode.ABORTED, "its data connection broke")


def _accept(
    stream: FrameStream,
    feed: Callable[[Iterator[bytes | memoryview]], None],
    messages: Iterator[bytes | memoryview],
    context: grpc.ServicerContext,
) -> None:
    _start(feed, messages, f"from {stream.peer}")
    if not context.add_callback(stream.close):  # the call has ended
        stream.close()


def _start(
    feed: Callable[[Iterator[bytes | memoryview]], None],
    messages: Iterator[bytes | memoryview],
    name: str,
) -> None:
    try:
        threading.Thread(target=feed, args=(messages,), daemon=True, name=name).start()
    except RuntimeError as error:  # too many threads: the stream ends with this cause
        feed(_failing(error))


def _failing(error: RuntimeError) -> Iterator[bytes]:
    yield from ()
    raise error
