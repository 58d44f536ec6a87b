"""Send and receive frames over one stream of messages, in pieces and with flow control."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from collapipe.errors import LinkError, WireError
from collapipe.wire import frames
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.grpc_errors import broken
from collapipe.wire.pieces import Cutter, Joiner

WINDOW = 4  # most activations or gradients that are sent but not yet received by the peer's code
CREDITED = WINDOW // 2  # frames that one credit allows; with 1, twice as many credits are sent
_FEW = 32  # frames to send; the owner may wait until no more are left
_MOST_WAITING = 64  # most frames that have arrived and wait for ``receive``
ACCEPTED = b"\4"  # instead of a piece: the other end has accepted the stream
_COUNTED = FrameKind.ACTIVATION, FrameKind.GRADIENT


class FrameStream:
    """One end of a stream of frames.

    The transport, gRPC or a data connection, sends the messages that ``outgoing`` yields. A thread
    of the owner runs ``feed`` on the messages that the transport receives.

    ``arrived`` is set when a frame can be received, and when few of many queued frames are left.
    The owner may replace the event, and may change ``max_bytes``. ``on_sent`` is called once the
    transport has taken all pieces of an activation or a gradient.

    The stream ends if the peer sends a frame of more than ``max_bytes``, a damaged frame, or more
    than ``WINDOW`` activations or gradients that have not been received. ``feed`` blocks while the
    waiting frames have ``max_bytes`` together; one frame may always wait.

    Frames that need no credit may overtake activations and gradients. Parts may occupy a slow link
    for many seconds, so all other frames go first, also between the pieces of a part.
    """

    def __init__(self, peer: str, max_bytes: int, arrived: threading.Event | None = None) -> None:
        self.peer, self.max_bytes = peer, max_bytes
        self.bytes_out = self.bytes_in = 0  # bytes_in excludes credits
        self.last_received_s = time.monotonic()  # when the last piece arrived
        self.last_moved_s = self.last_received_s  # or was sent, other than of a sign of life
        self.arrived = arrived or threading.Event()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for all threads but the one that sends
        self._to_send = threading.Condition(lock)
        self._incoming: deque[tuple[Frame, int]] = deque()  # with their bytes
        self._accepted = False
        self._full = False  # whether a received frame waits for room
        self._ended: LinkError | WireError | None = None
        self._urgent: deque[Frame] = deque()
        self._tensors: deque[Frame] = deque()
        self._parts: deque[Callable[[], Frame]] = deque()
        self._unmade = 0  # parts that are not made yet
        # sent but not credited, received but not credited
        self._credit, self._uncredited = WINDOW, 0
        self._cutter, self._joiner = Cutter(), Joiner()
        self._closed = False
        self._until: Callable[[], bool] | None = None  # when ``outgoing`` ends
        self._cancel: Callable[[], object] = lambda: None
        self.on_sent: Callable[[Frame], object] = lambda sent: None

    def send(self, frame: Frame) -> None:
        """Queue a frame and return at once. Activations and gradients wait for credit."""
        with self._changed:
            if self._closed:
                return
            if frame.kind == FrameKind.PART:
                self.send_later(lambda: frame)
                return
            (self._tensors if frame.kind in _COUNTED else self._urgent).append(frame)
            self._to_send.notify()

    def backlog(self) -> tuple[int, int]:
        """Return the numbers of queued frames without and with need of credit, parts not counted.

        A closed stream returns (0, 0).
        """
        return (0, 0) if self._closed else (len(self._urgent), len(self._tensors))

    def send_later(self, make: Callable[[], Frame]) -> None:
        """Queue a part that is made only when its turn comes, so that one part takes memory."""
        with self._changed:
            self._unmade += 1
            self._parts.append(make)
            self._to_send.notify()

    def drop_parts(self) -> None:
        """Remove all queued parts that are not made yet."""
        with self._changed:
            self._unmade -= len(self._parts)
            self._parts.clear()
        self.arrived.set()

    def all_made(self) -> bool:
        """Whether all parts are made or the stream is over; then ``arrived`` is set."""
        return not self._unmade or self.over

    @property
    def over(self) -> bool:
        """Whether the stream is closed or has ended: it sends nothing more."""
        return self._closed or self._ended is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the last piece arrived. While a frame waits here for room no piece can
        arrive, so this is 0."""
        return 0.0 if self._full else time.monotonic() - self.last_received_s

    def has_other(self, *kinds: FrameKind) -> bool:
        """Whether a frame of any other kind waits to be received."""
        return any(frame.kind not in kinds for frame, _ in tuple(self._incoming))

    def waiting(self) -> bool:
        """Whether ``receive`` would return or raise at once."""
        return bool(self._incoming) or self._ended is not None

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Return the next frame.

        Raises ``LinkError`` if the stream has ended, ``WireError`` if the peer sent an invalid
        frame, and ``queue.Empty`` after ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self.waiting, timeout_s):
                raise queue.Empty
            if not self._incoming:
                raise self._end()
            received, _ = self._incoming.popleft()
            self._changed.notify_all()
        self._uncredited += received.kind in _COUNTED
        if self._uncredited == CREDITED:
            self._uncredited = 0
            self.send(replace(received, kind=FrameKind.CREDIT, tensors=()))
        return received

    def take_part(self) -> Frame | None:
        """Return the next part that waits, even if other frames wait before it; None without."""
        with self._changed:
            for number, (frame, _) in enumerate(self._incoming):
                if frame.kind == FrameKind.PART:
                    del self._incoming[number]
                    self._changed.notify_all()
                    return frame
        return None

    def wait_until_accepted(self, timeout_s: float) -> None:
        """Block until the peer accepts the stream.

        Raises ``LinkError`` if it does not within ``timeout_s`` seconds, and ``WireError`` if it
        sends an invalid frame.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._accepted or self._ended is not None, timeout_s)
            if self._accepted:
                return  # also if it has ended meanwhile: ``receive`` has its last frames
            if self._ended is not None:
                raise self._end()
            raise LinkError(f"{self.peer}: the stream was not accepted within {timeout_s:g} s")

    def close(self) -> None:
        """End the stream now."""
        with self._changed:
            self._closed, cancel = True, self._cancel
            self._changed.notify_all()
            self._to_send.notify()
        cancel()

    def outgoing(self, until: Callable[[], bool] | None = None) -> Iterator[bytes]:
        """Yield the messages to send, until the stream closes or ``until`` returns true."""
        self._until = until
        for message in self._messages():
            self.bytes_out += len(message) - 1
            began_s = time.monotonic()
            yield message
            self._cutter.adapt(len(message), time.monotonic() - began_s)
            if self.backlog()[0] == _FEW:
                self.arrived.set()

    def on_close(self, cancel: Callable[[], object]) -> None:
        """Have ``close`` call ``cancel``; call it now if the stream is already closed."""
        with self._changed:
            self._cancel, closed = cancel, self._closed
        if closed:
            cancel()

    def feed_and_close(self, messages: Iterable[bytes]) -> None:
        """Do as ``feed``, then close the stream: this ends gRPC's threads, and what the peer still
        sends takes no memory."""
        self.feed(messages)
        self.close()

    def feed(self, messages: Iterable[bytes]) -> None:
        """Read all ``messages`` until the stream ends, and queue their frames for ``receive``."""
        ended: LinkError | WireError = LinkError(f"{self.peer}: ended the stream")
        try:
            for message in messages:
                self.last_received_s = time.monotonic()
                if message == ACCEPTED:
                    self._accept()
                elif (data := self._joiner.joined(message, self.max_bytes)) is None:
                    self.last_moved_s = self.last_received_s
                else:
                    self._take(frames.decode(data), len(data))
        except WireError as error:
            ended = WireError(f"{self.peer}: {error}")
        except Exception as error:  # gRPC's, a doorkeeper's, or no memory
            ended = broken(self.peer, error)
            error.__traceback__ = None  # gRPC's call raises itself: avoid a reference cycle
        with self._changed:
            self._ended = ended
            self._wake_readers()
        self.arrived.set()

    def _accept(self) -> None:
        with self._changed:
            self._accepted = True
            self._changed.notify_all()

    def _end(self) -> LinkError | WireError:
        """Copy the error that ended the stream: its traceback would keep frames in memory."""
        assert self._ended is not None
        return type(self._ended)(*self._ended.args)

    def _take(self, frame: Frame, size: int) -> None:
        """Queue a received frame once there is room for it."""
        if frame.kind != FrameKind.ALIVE:
            self.last_moved_s = time.monotonic()
        with self._changed:
            if frame.kind == FrameKind.CREDIT:
                self._credit = min(self._credit + CREDITED, WINDOW)
                self._to_send.notify()
                return  # nothing can be received
            self.bytes_in += size
            ahead = sum(each.kind in _COUNTED for each, _ in self._incoming)
            if frame.kind in _COUNTED and ahead == WINDOW:
                raise WireError(f"{frame.kind.name}: more than {WINDOW} that wait here")
            self._full = not self._has_room(size)
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
            self.last_received_s, self._full = time.monotonic(), False
            if self._closed:
                return
            self._incoming.append((frame, size))
            self._wake_readers()
        self.arrived.set()

    def _wake_readers(self) -> None:
        """Wake threads that wait for a frame or the end of the stream, under the lock."""
        self._changed.notify_all()
        if self._until is not None:
            self._to_send.notify()

    def _has_room(self, size: int) -> bool:
        kept = sum(each for _, each in self._incoming)
        return not kept or (kept + size <= self.max_bytes and len(self._incoming) < _MOST_WAITING)

    def _messages(self) -> Iterator[bytes]:
        part: Iterator[bytes] = iter(())
        while True:
            if (piece := next(part, None)) is not None:
                yield piece
                self.last_moved_s = time.monotonic()
            found = self._next(under_way=piece is not None)
            if found is None:
                if piece is None:
                    return
            elif isinstance(found, Frame):
                for own in self._cutter.pieces(found):
                    yield own
                    if found.kind != FrameKind.ALIVE:
                        self.last_moved_s = time.monotonic()
                if found.kind in _COUNTED:
                    self.on_sent(found)
            else:
                part = self._cutter.pieces(self._made(found))

    def _made(self, make: Callable[[], Frame]) -> Frame:
        try:
            return make()
        finally:
            with self._changed:
                self._unmade -= 1
            self.arrived.set()

    def _next(self, under_way: bool) -> Frame | Callable[[], Frame] | None:
        """Return the next frame to send, or the function that makes the next part.

        Returns None if the stream is closed, if a part is ``under_way`` and no frame may overtake
        it, or if nothing is queued and ``until`` of ``outgoing`` returns true.
        """
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if self._closed:
                    return None
                if self._tensors and self._credit:
                    self._credit -= 1
                    return self._tensors.popleft()
                if under_way:
                    return None
                if self._parts:
                    return self._parts.popleft()
                if self._until is not None and self._until():
                    return None
                self._to_send.wait()
