"""Make data connections: a device listens for those that it offers, and callers take them up.

The device that serves a stream offers a port, a ticket and two keys on the gRPC stream, which TLS
protects. The caller connects to the port, names the cipher and presents the ticket, which is valid
once.
"""

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from ipaddress import ip_address

from collapipe.errors import ConfigError, WireError, cause_of
from collapipe.wire.streams.data_connection import CONNECT_S, DataConnection, has_fast_aes, read

_ON_GRPC_S = 60.0  # before a data connection is tried again
_HIGHER = 10_000  # number of a data port above that of its gRPC port
_TICKET_BYTES, _KEY_BYTES = 16, 32
_OFFER = struct.Struct(f">H?{_TICKET_BYTES}s{_KEY_BYTES}s{_KEY_BYTES}s")
_MOST_STRANGERS = 32  # connections at the same time that have not presented a ticket
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A port, the ticket that it expects, and the keys of the messages of both ends; ``aes`` says
    whether AES is fast on the device."""

    port: int
    aes: bool
    ticket: bytes = field(repr=False)
    caller_key: bytes = field(repr=False)
    device_key: bytes = field(repr=False)

    def packed(self) -> bytes:
        """Return the offer as bytes, see ``unpacked``."""
        return _OFFER.pack(*astuple(self))

    @staticmethod
    def unpacked(packed: bytes) -> "Offer":
        """Return the offer in these bytes. Raises ``WireError`` for another number of bytes."""
        if len(packed) != _OFFER.size:
            raise WireError(f"an offer of a data connection has {len(packed)} bytes")
        return Offer(*_OFFER.unpack(packed))


class DataPort:
    """Listens for the connections that it offers, until ``close``: on the ``host``'s port that is
    ``_HIGHER`` than its ``first`` one, which a firewall can allow, or on a free one if another
    program has that. Raises ``ConfigError`` if it cannot listen."""

    def __init__(self, host: str, first: int) -> None:
        try:
            self._listening = _listening(host, first + _HIGHER)
        except OSError as error:
            raise ConfigError(
                f"{host}: cannot listen on a second port: {cause_of(error)}"
            ) from error
        self._port: int = self._listening.getsockname()[1]
        self._closed = False
        self._offers = dict[bytes, tuple[Offer, Future[DataConnection]]]()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, daemon=True, name="data port").start()

    def close(self) -> None:
        """Accept no more connections. The open ones belong to their streams."""
        self._closed = True
        with suppress(OSError):  # some systems refuse this for a listening socket
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    @contextmanager
    def offered(self) -> Iterator[tuple[Offer, Future[DataConnection]]]:
        """Return an offer and the connection that takes it up, which ends with the context."""
        ticket, caller_key, device_key = map(
            secrets.token_bytes, (_TICKET_BYTES, _KEY_BYTES, _KEY_BYTES)
        )
        offer = Offer(self._port, has_fast_aes(), ticket, caller_key, device_key)
        made = Future[DataConnection]()
        self._offers[ticket] = offer, made
        try:
            yield offer, made
        finally:
            self._offers.pop(ticket, None)
            if not made.cancel():
                made.result().close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(CONNECT_S)  # too many open files for now
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except RuntimeError:  # too many threads: the caller stays on gRPC
                self._strangers.release()
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """Hand a connection with a valid ticket over, and close others."""
        own: DataConnection | None = None
        try:
            connection.settimeout(None)
            first = memoryview(bytearray(1 + _TICKET_BYTES))
            if not read(connection, first, time.monotonic() + CONNECT_S):
                raise ConnectionError("ended")
            offer, made = self._offers.pop(first[1:].tobytes())
            own = DataConnection(connection, offer.device_key, offer.caller_key, bool(first[0]))
            own.greet()
            made.set_result(own)
        except (OSError, KeyError, RuntimeError, InvalidStateError):
            (own or connection).close()  # a stranger, too many threads, or the stream has ended
        finally:
            self._strangers.release()


class DataRoute:
    """Makes data connections to a device, whose ``name`` is for messages. After a failure, streams
    to the device stay on gRPC for a while, because each attempt may delay a round."""

    def __init__(self, name: str, host: str) -> None:
        self._name, self._host, self._on_grpc_until = name, host, 0.0

    def connect(self, offer: Offer, is_over: Callable[[], bool]) -> DataConnection | None:
        """Take up an offer; None if that is not possible. It does not count as a failure if the
        stream ``is_over`` meanwhile."""
        if time.monotonic() < self._on_grpc_until:
            return None
        try:
            return connected(self._host, offer)
        except OSError as error:
            if not is_over():
                self.stay_on_grpc(f"port {offer.port}: {cause_of(error)}")
            return None

    def stay_on_grpc(self, why: str) -> None:
        """Make no data connection for a while."""
        self._on_grpc_until = time.monotonic() + _ON_GRPC_S
        _log.info("%s: %s; tensors stay on gRPC", self._name, why)


def connected(host: str, offer: Offer) -> DataConnection:
    """Take up an ``offer`` of the device ``host``. Raises ``OSError`` if this is not possible."""
    connection = socket.create_connection((host, offer.port), CONNECT_S)
    try:
        by_aes = offer.aes and has_fast_aes()
        connection.sendall(by_aes.to_bytes() + offer.ticket)
        made = DataConnection(connection, offer.caller_key, offer.device_key, by_aes)
        made.check_greeting()
    except (OSError, RuntimeError, WireError) as error:  # RuntimeError: too many threads
        connection.close()
        raise ConnectionError(cause_of(error)) from error
    return made


def _listening(host: str, port: int) -> socket.socket:
    """Listen on a ``port`` of ``host``, or on a free one."""
    with suppress(OSError, OverflowError):  # taken, not allowed, or beyond the last one
        return _listening_on(host, port)
    return _listening_on(host, 0)


def _listening_on(host: str, port: int) -> socket.socket:
    """Listen on a port; all addresses include those of IPv6, as gRPC does."""
    found = {each[0] for each in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    with suppress(ValueError):  # a name
        if ip_address(host).is_unspecified and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
    return socket.create_server((host, port), family=family)
