"""A TCP connection that carries a device stream's messages for less processor time than gRPC.

Each message is encrypted and authenticated with the key of its direction and its number, by the
cipher that the ends agreed on, as in TLS: AES-256-GCM or ChaCha20-Poly1305. So a message that was
changed, repeated, left out or reordered on the way ends the connection. Both ends send an empty
message every few seconds, so that a connection whose network has failed is noticed.
"""

import functools
import select
import socket
import struct
import threading
import time
import timeit
from contextlib import suppress
from mmap import mmap

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from collapipe.errors import WireError
from collapipe.tensors import ALIGNMENT
from collapipe.wire.streams.pieces import PIECE_BYTES

CONNECT_S = 2.0  # to connect, to present a ticket, and to greet
_PULSE_S, _SILENT_S = 2.0, 30.0  # between empty messages; without any, after which it has failed
_TAG_BYTES, _NONCE_BYTES = 16, 12
_TRIED_BYTES = 2**16  # encrypted to compare the ciphers' speeds
_LENGTH_BYTES = 4  # of a message's length, before it
_MOST_BYTES = PIECE_BYTES + 1 + _TAG_BYTES  # of an encrypted message
_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_NOTSENT_LOWAT": 256 * 1024,  # bytes in the system's buffer: no frame waits long there
}


@functools.cache
def has_fast_aes() -> bool:
    """Whether AES-GCM is the faster cipher here: the processor has instructions for it, as most but
    not a Raspberry Pi 4."""

    def least_s(cipher: AESGCM | ChaCha20Poly1305) -> float:
        nonce, message = bytes(_NONCE_BYTES), bytes(_TRIED_BYTES)
        encrypt = functools.partial(cipher.encrypt, nonce, message, None)
        return min(timeit.repeat(encrypt, number=1, repeat=5))

    return least_s(AESGCM(bytes(32))) < least_s(ChaCha20Poly1305(bytes(32)))


class DataConnection:
    """One end of a connection. Any thread may ``send`` while one does ``receive``."""

    def __init__(
        self, connection: socket.socket, own_key: bytes, other_key: bytes, by_aes: bool
    ) -> None:
        self._socket, self._ended = connection, threading.Event()
        self._sending, self._receiving = threading.RLock(), threading.Lock()
        cipher = AESGCM if by_aes else ChaCha20Poly1305
        self._own, self._other = cipher(own_key), cipher(other_key)
        self._num_sent = self._num_received = 0
        # mapped, because buffers of each round's connections would fragment the heap
        self._sealed = memoryview(mmap(-1, _LENGTH_BYTES + _MOST_BYTES))
        self._unsent = self._sealed[:0]  # of the last message
        self._arriving = memoryview(mmap(-1, _MOST_BYTES))
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
            self._send_rest()
            self._seal(message)
            self._send_rest()

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
        greeting = self.receive(_TAG_BYTES, time.monotonic() + CONNECT_S)
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
            if not read(self._socket, head := self._arriving[:_LENGTH_BYTES], until_s):
                return None
            if (length := int.from_bytes(head)) > most_bytes:
                raise WireError(f"a message of {length:,} bytes, at most {most_bytes:,}")
            found = self._arriving[:length]
            return found if read(self._socket, found, until_s) else None
        except OSError:
            if self.is_closed:
                return None
            raise

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
                    self.send(b"")
            except OSError:  # the thread that receives reports why
                return
            finally:
                self._sending.release()


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


def read(connection: socket.socket, into: memoryview, until_s: float | None) -> bool:
    """Fill ``into`` with the next bytes; False if the connection ends before.

    Raises ``OSError`` if it breaks, and if bytes are lacking at the time ``until_s`` of
    ``time.monotonic``. Without that time, it raises it for silence, see ``_limit_silence``.
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
