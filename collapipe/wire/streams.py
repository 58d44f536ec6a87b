"""Frames both ways over one gRPC stream, in pieces, and never far ahead of who takes them."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import grpc

from collapipe.errors import LinkError, WireError, one_line
from collapipe.wire import frames
from collapipe.wire.frames import Frame, FrameKind

PIECE_BYTES = 512 * 1024  # so that no message keeps a slow link to itself for long
WINDOW = 4  # activations, or gradients, that the other end has not taken yet
_MORE, _LAST = b"\0", b"\1"
_COUNTED = FrameKind.ACTIVATION, FrameKind.GRADIENT


class FrameStream:
    """One end of a stream. gRPC sends what ``outgoing`` yields; a thread of the owner runs
    ``feed`` on what gRPC receives.

    ``arrived`` is set whenever there is something to ``receive``. A frame of more than
    ``max_bytes`` ends the stream, as does one that is damaged.
    """

    def __init__(self, peer: str, max_bytes: int, arrived: threading.Event | None = None) -> None:
        self.peer = peer
        self.bytes_out = self.bytes_in = 0
        self._max_bytes = max_bytes
        self._arrived = arrived or threading.Event()
        self._incoming: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._urgent: deque[Frame] = deque()
        self._tensors: deque[Frame] = deque()
        self._credit = WINDOW
        self._closed = False
        self._cancel: Callable[[], object] | None = None

    def send(self, frame: Frame) -> None:
        """Return at once; activations and gradients wait for the other end's credit."""
        with self._changed:
            (self._tensors if frame.kind in _COUNTED else self._urgent).append(frame)
            self._changed.notify()

    def waiting(self) -> bool:
        """Whether ``receive`` would return or raise at once."""
        return not self._incoming.empty()

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises ``LinkError`` where the stream has ended, ``WireError`` where the
        other end sent what is no frame, and ``queue.Empty`` after ``timeout_s``."""
        received = self._incoming.get(timeout=timeout_s)
        if isinstance(received, Exception):
            self._incoming.put(received)  # the next one to ask gets the same answer
            raise received
        if received.kind in _COUNTED:
            self.send(Frame(FrameKind.CREDIT, received.round, received.step, 0))
        return received

    def close(self) -> None:
        """End the stream now."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._cancel is not None:
            self._cancel()

    def outgoing(self) -> Iterator[bytes]:
        """Messages for gRPC."""
        while (frame := self._next()) is not None:
            data = frames.encode(frame)
            self.bytes_out += len(data)
            for start in range(0, len(data), PIECE_BYTES):
                stop = start + PIECE_BYTES
                yield (_MORE if stop < len(data) else _LAST) + data[start:stop]

    def on_close(self, cancel: Callable[[], object]) -> None:
        """``close`` calls ``cancel`` as well."""
        self._cancel = cancel

    def feed(self, messages: Iterable[bytes]) -> None:
        """Take in all ``messages``, up to the stream's end."""
        try:
            for data in _joined(messages, self._max_bytes):
                self.bytes_in += len(data)
                self._take(frames.decode(data))
            self._put(LinkError(f"{self.peer}: ended the stream"))
        except grpc.RpcError as error:
            self._put(LinkError(f"{self.peer}: {reason(error)}"))
        except WireError as error:
            self._put(WireError(f"{self.peer}: {error}"))

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrameKind.CREDIT:
            with self._changed:
                self._credit = min(self._credit + 1, WINDOW)
                self._changed.notify()
        else:
            self._put(frame)

    def _put(self, received: Frame | Exception) -> None:
        self._incoming.put(received)
        self._arrived.set()

    def _next(self) -> Frame | None:
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if self._closed:
                    return None
                if self._tensors and self._credit:
                    self._credit -= 1
                    return self._tensors.popleft()
                self._changed.wait()


def _joined(messages: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Frames' bytes from their pieces. Raises ``WireError`` before more than ``max_bytes`` of one
    are kept."""
    pieces, size = list[bytes](), 0
    for message in messages:
        if message[:1] not in (_MORE, _LAST) or len(message) > PIECE_BYTES + 1:
            raise WireError(f"a message of {len(message):,} bytes that is no piece of a frame")
        pieces.append(message[1:])
        size += len(message) - 1
        if size > max_bytes or len(pieces) > 1 + max_bytes // 1024:
            raise WireError(f"a frame of more than {max_bytes:,} bytes")
        if message[:1] == _LAST:
            yield b"".join(pieces)
            pieces, size = [], 0


def reason(error: grpc.RpcError) -> str:
    """gRPC's code and words."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {one_line(error.details())}"
    return "closed the connection"
