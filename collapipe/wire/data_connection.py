"""A TCP connection that carries a device stream's messages for less processor time than gRPC.

The device that serves the stream offers a port, a ticket and two keys on the gRPC stream, which TLS
protects. The caller connects to the port and presents the ticket, which is valid once. Then both
ends send all messages of the stream on this connection, each encrypted and authenticated
(ChaCha20-Poly1305) with the key of its direction and its number. So a message that was changed,
repeated, left out or reordered on the way ends the stream. The gRPC stream stays open: if it ends,
for example because a certificate is revoked, the connection ends too.

If the caller cannot connect to the port, for example because of a firewall, messages stay on the
gRPC stream. The caller's first message there says which. Both ends send an empty message every few
seconds, so that a connection whose network has failed is noticed.
"""

import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from collapipe.errors import ConfigError, WireError, cause_of
from collapipe.tensors import ALIGNMENT
from collapipe.wire.pieces import PIECE_BYTES
from collapipe.wire.streams import ACCEPTED, FrameStream

_CONNECT_S = 2.0  # to connect, to present a ticket, and to greet
_ON_GRPC_S = 60.0  # before a data connection is tried again
_PULSE_S, _SILENT_S = 2.0, 30.0  # between empty messages; without any, after which it has failed
_HIGHER = 10_000  # number of a data port above that of its gRPC port
_TICKET_BYTES, _KEY_BYTES, _TAG_BYTES, _NONCE_BYTES = 16, 32, 16, 12
_LENGTH_BYTES = 4  # of a message's length, before it
_MOST_BYTES = PIECE_BYTES + 1 + _TAG_BYTES  # of an encrypted message
_MOST_STRANGERS = 32  # connections at the same time that have not presented a ticket
_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_NOTSENT_LOWAT": 256 * 1024,  # bytes in the system's buffer: no frame waits long there
}
ON_GRPC, ON_CONNECTION = b"\5", b"\6"  # the caller's first message: where all others go
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A port, the ticket that it expects, and the keys of the messages of both ends."""

    port: int
    ticket: bytes = field(repr=False)
    caller_key: bytes = field(repr=False)
    device_key: bytes = field(repr=False)

    def packed(self) -> bytes:
        """Return the offer as bytes, see ``unpacked``."""
        return self.port.to_bytes(2) + self.ticket + self.caller_key + self.device_key

    @staticmethod
    def unpacked(packed: bytes) -> "Offer":
        """Return the offer in these bytes. Raises ``WireError`` for another number of bytes."""
        ends = 2, 2 + _TICKET_BYTES, 2 + _TICKET_BYTES + _KEY_BYTES
        if len(packed) != ends[-1] + _KEY_BYTES:
            raise WireError(f"an offer of a data connection has {len(packed)} bytes")
        port, ticket, caller_key, device_key = (
            packed[start:stop] for start, stop in zip((0, *ends), (*ends, None), strict=True)
        )
        return Offer(int.from_bytes(port), ticket, caller_key, device_key)


class DataConnection:
    """One end of a connection. Any thread may ``send`` while one does ``receive``."""

    def __init__(self, connection: socket.socket, own_key: bytes, other_key: bytes) -> None:
        self._socket, self._ended = connection, threading.Event()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._own, self._other = ChaCha20Poly1305(own_key), ChaCha20Poly1305(other_key)
        self._num_sent = self._num_received = 0
        self._sealed = memoryview(bytearray(_LENGTH_BYTES + _MOST_BYTES))
        self._unsent = self._sealed[:0]  # of the last message
        self._arriving = memoryview(bytearray(_MOST_BYTES))
        connection.settimeout(None)
        _limit_silence(connection, _SILENT_S)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_closed(self) -> bool:
        """Whether this end has closed the connection."""
        return self._ended.is_set()

    def send(self, message: bytes) -> None:
        """Send a message. Raises ``OSError`` if the connection has ended."""
        with self._sending:
            self._send(message)

    def send_now(self, message: bytes) -> bool:
        """Send what can be sent of a message without waiting. Returns whether that is all of it; if
        not, ``send`` must be next, which sends the rest or raises why it cannot."""
        with self._sending:
            self._seal(message)
            with suppress(OSError):
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
            return not self._unsent

    def receive(
        self, most_bytes: int = _MOST_BYTES, until_s: float | None = None
    ) -> memoryview | None:
        """Return the next message, or None at the connection's end. A tensor that begins after its
        first byte is aligned.

        Raises ``WireError`` for a message that is too long or not the peer's next one. Raises
        ``OSError`` if the connection breaks or is silent, or at the time ``until_s``.
        """
        with self._receiving:
            sealed = None if self.is_closed else self._received(most_bytes, until_s)
        if sealed is None:
            return None
        message = _room(len(sealed) - _TAG_BYTES)
        try:
            nonce = self._num_received.to_bytes(_NONCE_BYTES)
            self._other.decrypt_into(nonce, sealed, None, message)
        except InvalidTag as error:
            raise WireError("a message was not the peer's next one") from error
        self._num_received += 1
        return message

    def greet(self) -> None:
        """Show that this end has the keys, and begin to show that it is alive."""
        self.send(b"")
        threading.Thread(target=self._pulse, daemon=True, name="data pulse").start()

    def check_greeting(self) -> None:
        """Raise ``WireError`` or ``OSError`` unless the peer greets in time; then greet it."""
        greeting = self.receive(_TAG_BYTES, time.monotonic() + _CONNECT_S)
        if greeting is None or len(greeting):
            raise WireError("the port answered with something else")
        _limit_silence(self._socket, _SILENT_S)
        self.greet()

    def close(self) -> None:
        """End the connection. A call that waits returns None or raises ``OSError``."""
        self._ended.set()
        with suppress(OSError):  # the peer has ended it
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes waiting threads
        with self._sending, self._receiving:  # else another file could get their descriptor
            self._socket.close()

    def _received(self, most_bytes: int, until_s: float | None) -> memoryview | None:
        """Return the next encrypted message, valid until the one after it, or None at the
        connection's end."""
        try:
            if not _read(self._socket, head := self._arriving[:_LENGTH_BYTES], until_s):
                return None
            if (length := int.from_bytes(head)) > most_bytes:
                raise WireError(f"a message of {length:,} bytes, at most {most_bytes:,}")
            found = self._arriving[:length]
            return found if _read(self._socket, found, until_s) else None
        except OSError:
            if self.is_closed:
                return None
            raise

    def _send(self, message: bytes) -> None:
        self._send_rest()
        self._seal(message)
        self._send_rest()

    def _send_rest(self) -> None:
        self._socket.sendall(self._unsent)
        self._unsent = self._unsent[:0]

    def _seal(self, message: bytes) -> None:
        """Encrypt a message, to be sent. If that fails, there is nothing to send."""
        length = len(message) + _TAG_BYTES
        sealed = self._sealed[: _LENGTH_BYTES + length]
        sealed[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES)
        nonce = self._num_sent.to_bytes(_NONCE_BYTES)
        self._own.encrypt_into(nonce, message, None, sealed[_LENGTH_BYTES:])
        self._num_sent += 1
        self._unsent = sealed

    def _pulse(self) -> None:
        """Send an empty message from time to time, if that does not have to wait."""
        while not self._ended.wait(_PULSE_S):
            if not self._sending.acquire(blocking=False):
                continue  # another message is on its way
            try:
                if not self.is_closed and _has_room(self._socket):
                    self._send(b"")
            except OSError:  # the thread that receives reports why
                return
            finally:
                self._sending.release()


class Lane:
    """Where a stream's messages go, once that is decided: on a data connection, or on gRPC.

    ``broke`` says that the connection ended before this end closed it.
    """

    def __init__(self) -> None:
        self._decided = Future[DataConnection | None]()
        self.broke = False

    def decide(self, connection: DataConnection | None) -> None:
        """Choose the ``connection``, or gRPC if it is None. A closed lane ends the connection."""
        try:
            self._decided.set_result(connection)
        except InvalidStateError:
            if connection is not None:
                connection.close()

    def connection(self) -> DataConnection | None:
        """Wait for the decision, and return it."""
        return self._decided.result()

    def close(self) -> None:
        """End the connection, if there is one."""
        self.decide(None)
        if (connection := self.connection()) is not None:
            connection.close()

    def caller_messages(self, stream: FrameStream) -> Iterator[bytes]:
        """Yield what the caller sends on gRPC: its decision, and without a connection all messages
        of its ``stream``."""
        connection = self.connection()
        yield ON_GRPC if connection is None else ON_CONNECTION
        yield from self._sent(stream)

    def device_messages(self, stream: FrameStream, offer: Offer) -> Iterator[bytes]:
        """Yield what the device sends on gRPC: its ``offer``, and without a connection all messages
        of its ``stream``."""
        yield ACCEPTED + offer.packed()
        yield from self._sent(stream)

    def to_caller(
        self, answers: Iterable[bytes], connect: Callable[[Offer], DataConnection | None]
    ) -> Iterator[bytes | memoryview]:
        """Yield what the caller receives, from the device's ``answers`` on gRPC and then from where
        all others go. Raises ``WireError`` for an invalid message, and ``OSError`` if the
        connection breaks."""
        answers = iter(answers)
        if (first := next(answers, None)) is None:
            return
        if not first.startswith(ACCEPTED):
            raise WireError("the first message is no offer of a data connection")
        yield ACCEPTED
        self.decide(connect(Offer.unpacked(first[len(ACCEPTED) :])))
        yield from self._received(answers)

    def to_device(
        self, messages: Iterable[bytes], made: Future[DataConnection]
    ) -> Iterator[bytes | memoryview]:
        """Yield what the device receives, if ``made`` has the caller's connection once there is
        one. Raises errors as ``to_caller`` does."""
        messages = iter(messages)
        if (first := next(messages, None)) is None:
            return
        if first not in (ON_GRPC, ON_CONNECTION):
            raise WireError("the first message does not say where the others go")
        try:
            self.decide(made.result(_CONNECT_S) if first == ON_CONNECTION else None)
        except TimeoutError as error:
            raise WireError("named a data connection that it has not made") from error
        yield from self._received(messages)

    def _sent(self, stream: FrameStream) -> Iterator[bytes]:
        if (connection := self.connection()) is None:
            yield from stream.outgoing()
            return
        with suppress(OSError):  # the thread that receives reports why
            for message in stream.outgoing(send_now=connection.send_now):
                connection.send(message)

    def _received(self, messages: Iterator[bytes]) -> Iterator[bytes | memoryview]:
        if (connection := self.connection()) is None:
            yield from messages
            return
        try:
            while (message := connection.receive()) is not None:
                if message:
                    yield message
        finally:
            self.broke = not connection.is_closed


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
        offer = Offer(self._port, ticket, caller_key, device_key)
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
                time.sleep(_CONNECT_S)  # too many open files for now
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
            ticket = memoryview(bytearray(_TICKET_BYTES))
            if not _read(connection, ticket, time.monotonic() + _CONNECT_S):
                raise ConnectionError("ended")
            offer, made = self._offers.pop(ticket.tobytes())
            own = DataConnection(connection, offer.device_key, offer.caller_key)
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
    connection = socket.create_connection((host, offer.port), _CONNECT_S)
    try:
        connection.sendall(offer.ticket)
        made = DataConnection(connection, offer.caller_key, offer.device_key)
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


def _has_room(connection: socket.socket) -> bool:
    """Whether a short message can be sent at once."""
    room = select.poll()
    room.register(connection, select.POLLOUT)
    return bool(room.poll(0))


def _limit_silence(connection: socket.socket, seconds: float) -> None:
    """Let reads fail if nothing arrives in as many ``seconds``."""
    whole, fraction = divmod(seconds, 1)
    limit = struct.pack("ll", int(whole), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _read(connection: socket.socket, into: memoryview, until_s: float | None) -> bool:
    """Fill ``into`` with the next bytes; False if the connection ends before.

    Raises ``OSError`` if it breaks, and if bytes are lacking at the time ``until_s`` of
    ``time.monotonic``; if that is None, if it is silent, see ``_limit_silence``.
    """
    how = socket.MSG_WAITALL if until_s is None else 0  # some systems limit each wait of a call
    while into:
        if until_s is not None:
            _limit_silence(connection, max(until_s - time.monotonic(), 0.001))  # 0 is no limit
        try:
            got = connection.recv_into(into, 0, how)
        except BlockingIOError as error:
            raise TimeoutError("no sign of life") from error
        if not got:
            return False
        into = into[got:]
    return True


def _room(size: int) -> memoryview:
    """Return room for a message whose second byte is aligned. It is not set to zero."""
    whole = np.empty(max(size, 0) + ALIGNMENT, np.uint8)
    first = -(whole.__array_interface__["data"][0] + 1) % ALIGNMENT
    return whole.data[first : first + size]
