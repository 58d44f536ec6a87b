"""Send and receive frames over one stream of messages, in pieces and with flow control."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from collapipe.errors import LinkError, WireError
from collapipe.wire import frames
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.grpc_errors import broken
from collapipe.wire.streams.outbox import COUNTED, CREDITED, WINDOW, Begun, Outbox
from collapipe.wire.streams.pieces import MOST_CREDITS, Cutter, Joiner, credits_of

_FEW = 32  # frames to send; the owner may wait until no more are left
_MOST_WAITING = 64  # most frames that have arrived and wait for ``receive``
ACCEPTED = b"\4"  # instead of a piece: the other end has accepted the stream
_SMALL_BYTES = 256 * 1024  # of a frame for which a change of threads takes longer than to send it


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
    """

    def __init__(self, peer: str, max_bytes: int, arrived: threading.Event | None = None) -> None:
        self.peer, self.max_bytes = peer, max_bytes
        self.bytes_out = self.bytes_in = 0  # bytes_in excludes credits
        self.last_received_s = time.monotonic()  # when the last piece arrived
        self.last_moved_s = self.last_received_s  # or was sent, other than of a sign of life
        self.arrived = arrived or threading.Event()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for all threads but the one that sends
        self._outbox = Outbox(lock)
        self._incoming: deque[tuple[Frame, int]] = deque()  # with their bytes
        self._accepted = False
        self._full = False  # whether a received frame waits for room
        self._ended: LinkError | WireError | None = None
        self._uncredited = 0  # activations and gradients that were received since the last credit
        self._cutter, self._joiner = Cutter(), Joiner()
        self._send_now: Callable[[bytes], bool] | None = None
        self._until: Callable[[], bool] | None = None  # when ``outgoing`` ends
        self._cancel: Callable[[], object] = lambda: None
        self.on_sent: Callable[[Frame], object] = lambda sent: None

    def send(self, frame: Frame) -> None:
        """Queue a frame and return at once. Activations and gradients wait for credit.

        A small frame is sent now if nothing is queued, which saves a change of threads. An error
        meanwhile closes the stream.
        """
        if frame.kind == FrameKind.PART:
            self.send_later(lambda: frame)
        elif self._is_for_now(frame) and self._outbox.claim(frame):
            try:
                self._outbox.release(self._give(frame))
            except BaseException:
                self.close()  # the peer may have some pieces of the frame
                self._outbox.release(None)
                raise
        else:
            self._outbox.add(frame)

    def send_later(self, make: Callable[[], Frame]) -> None:
        """Queue a part that is made only when its turn comes, so that one part takes memory."""
        self._outbox.add_part(make)

    def backlog(self) -> tuple[int, int]:
        """Return the numbers of queued frames without and with need of credit, parts not counted.

        A closed stream returns (0, 0).
        """
        return self._outbox.sizes()

    def drop_parts(self) -> None:
        """Remove all queued parts that are not made yet."""
        self._outbox.drop_parts()
        self.arrived.set()

    def all_made(self) -> bool:
        """Whether all parts are made or the stream is over; then ``arrived`` is set."""
        return not self._outbox.unmade or self.over

    @property
    def over(self) -> bool:
        """Whether the stream is closed or has ended: it sends nothing more."""
        return self._outbox.is_closed or self._ended is not None

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
            self._uncredited += received.kind in COUNTED
            due = received.kind in COUNTED and self._uncredited == CREDITED
        if due:
            at = received.round, received.step, received.micro_batch
            self.send(Frame(FrameKind.CREDIT, *at, epoch=received.epoch))
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
            cancel = self._cancel
            self._outbox.close()
            self._changed.notify_all()
        cancel()

    def outgoing(
        self,
        until: Callable[[], bool] | None = None,
        send_now: Callable[[bytes], bool] | None = None,
    ) -> Iterator[bytes]:
        """Yield the messages to send, until the stream closes or ``until`` returns true.

        If the transport can ``send_now``, it gets a message from another thread, sends what it can
        without waiting, and returns whether that was all of it. If not, an empty message follows,
        before which it must send the rest.
        """
        self._until, self._send_now = until, send_now
        for message in self._messages():
            self.bytes_out += max(len(message) - 1, 0)
            began_s = time.monotonic()
            yield message
            self._cutter.adapt(len(message), time.monotonic() - began_s)
            if self.backlog()[0] == _FEW:
                self.arrived.set()

    def on_close(self, cancel: Callable[[], object]) -> None:
        """Have ``close`` call ``cancel``; call it now if the stream is already closed."""
        with self._changed:
            self._cancel, closed = cancel, self._outbox.is_closed
        if closed:
            cancel()

    def feed_and_close(self, messages: Iterable[bytes | memoryview]) -> None:
        """Do as ``feed``, then close the stream: this ends gRPC's threads, and what the peer still
        sends takes no memory."""
        self.feed(messages)
        self.close()

    def feed(self, messages: Iterable[bytes | memoryview]) -> None:
        """Read all ``messages`` until the stream ends, and queue their frames for ``receive``."""
        ended: LinkError | WireError = LinkError(f"{self.peer}: ended the stream")
        try:
            for message in messages:
                self._take_message(message)
        except WireError as error:
            ended = WireError(f"{self.peer}: {error}")
        except Exception as error:  # gRPC's, a doorkeeper's, or no memory
            ended = broken(self.peer, error)
            error.__traceback__ = None  # gRPC's call raises itself: avoid a reference cycle
        with self._changed:
            self._ended = ended
            self._wake_readers()
        self.arrived.set()

    def _take_message(self, message: bytes | memoryview) -> None:
        self.last_received_s = time.monotonic()
        if message == ACCEPTED:
            with self._changed:
                self._accepted = True
                self._changed.notify_all()
            return
        data = self._joiner.joined(message, self.max_bytes)
        if credits := credits_of(message):
            self._outbox.credit(credits)
        if data is None:
            self.last_moved_s = self.last_received_s
        else:
            self._take(frames.decode(data), len(data))

    def _end(self) -> LinkError | WireError:
        """Copy the error that ended the stream: its traceback would keep frames in memory."""
        assert self._ended is not None
        return type(self._ended)(*self._ended.args)

    def _take(self, frame: Frame, size: int) -> None:
        """Queue a received frame once there is room for it."""
        self._note_moved(frame)
        if frame.kind == FrameKind.CREDIT:
            return  # nothing can be received
        with self._changed:
            self.bytes_in += size
            ahead = sum(each.kind in COUNTED for each, _ in self._incoming)
            if frame.kind in COUNTED and ahead == WINDOW:
                raise WireError(f"{frame.kind.name}: more than {WINDOW} that wait here")
            self._full = not self._has_room(size)
            self._changed.wait_for(lambda: self._outbox.is_closed or self._has_room(size))
            self.last_received_s, self._full = time.monotonic(), False
            if self._outbox.is_closed:
                return
            self._incoming.append((frame, size))
            self._wake_readers()
        self.arrived.set()

    def _wake_readers(self) -> None:
        """Wake threads that wait for a frame or the end of the stream, under the lock."""
        self._changed.notify_all()
        if self._until is not None:
            self._outbox.wake()

    def _has_room(self, size: int) -> bool:
        kept = sum(each for _, each in self._incoming)
        return not kept or (kept + size <= self.max_bytes and len(self._incoming) < _MOST_WAITING)

    def _is_for_now(self, frame: Frame) -> bool:
        small = sum(each.nbytes for each in frame.tensors) <= _SMALL_BYTES
        return small and self._send_now is not None

    def _give(self, frame: Frame) -> Begun | None:
        """Give a frame to the transport. Returns what is left once that would have to wait."""
        assert self._send_now is not None
        pieces = self._pieces(frame)
        for piece in pieces:
            self.bytes_out += len(piece) - 1
            if not self._send_now(piece):
                return frame, chain((b"",), pieces)
            self._note_moved(frame)
            self._cutter.adapt(len(piece), 0.0)
        self._note_sent(frame)
        return None

    def _messages(self) -> Iterator[bytes]:
        part: Iterator[bytes] = iter(())
        while True:
            if (piece := next(part, None)) is not None:
                yield piece
                self.last_moved_s = time.monotonic()
            found = self._outbox.next(piece is not None, self._until)
            if found is None:
                if piece is None:
                    return
            elif isinstance(found, Frame):
                yield from self._whole(found, self._pieces(found))
            elif isinstance(found, tuple):
                yield from self._whole(*found)
            else:
                part = self._cutter.pieces(self._made(found))

    def _pieces(self, frame: Frame) -> Iterator[bytes]:
        with self._changed:
            credits = min(self._uncredited, MOST_CREDITS)
            self._uncredited -= credits
        return self._cutter.pieces(frame, credits)

    def _whole(self, frame: Frame, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self._note_moved(frame)
        self._note_sent(frame)

    def _note_moved(self, frame: Frame) -> None:
        if frame.kind != FrameKind.ALIVE:
            self.last_moved_s = time.monotonic()

    def _note_sent(self, frame: Frame) -> None:
        if frame.kind in COUNTED:
            self.on_sent(frame)

    def _made(self, make: Callable[[], Frame]) -> Frame:
        try:
            return make()
        finally:
            self._outbox.count_made()
            self.arrived.set()
