"""The frames that a stream has to send, and which of its threads sends the next one."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from collapipe.wire.frames import Frame, FrameKind

WINDOW = 4  # most activations or gradients that are sent but not yet received by the peer's code
CREDITED = WINDOW - 1  # received ones whose credits do not wait for a frame that brings them
COUNTED = FrameKind.ACTIVATION, FrameKind.GRADIENT  # kinds of frames that need credit
Begun = tuple[Frame, Iterator[bytes]]
"""A frame of which some pieces are sent, and the others."""


class Outbox:
    """The queues of a stream, under its ``lock``.

    Frames that need no credit may overtake activations and gradients. Parts may occupy a slow link
    for many seconds, so all other frames go first, also between the pieces of a part.

    One thread of the stream takes the ``next`` frame again and again. While it waits, another
    thread may ``claim`` to send a frame itself.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self.is_closed = False
        self.unmade = 0  # parts that are not made yet
        self._changed = threading.Condition(lock)
        self._urgent, self._tensors = deque[Frame](), deque[Frame]()
        self._parts = deque[Callable[[], Frame]]()
        self._begun: Begun | None = None
        self._credit = WINDOW
        self._is_idle = False  # whether ``next`` waits, and nothing that it may return is queued
        self._is_claimed = False

    def add(self, frame: Frame) -> None:
        """Queue a frame, unless the stream is closed."""
        with self._changed:
            if not self.is_closed:
                (self._tensors if frame.kind in COUNTED else self._urgent).append(frame)
                self.wake()

    def add_part(self, make: Callable[[], Frame]) -> None:
        """Queue a part that is made only when its turn comes, so that one part takes memory, unless
        the stream is closed."""
        with self._changed:
            if not self.is_closed:
                self.unmade += 1
                self._parts.append(make)
                self.wake()

    def drop_parts(self) -> None:
        """Remove all queued parts."""
        with self._changed:
            self.unmade -= len(self._parts)
            self._parts.clear()

    def count_made(self) -> None:
        """Count a part that ``next`` has returned as made."""
        with self._changed:
            self.unmade -= 1

    def sizes(self) -> tuple[int, int]:
        """Return the numbers of queued frames without and with need of credit, parts not counted.

        They are 0 if the stream is closed.
        """
        return (0, 0) if self.is_closed else (len(self._urgent), len(self._tensors))

    def claim(self, frame: Frame) -> bool:
        """Return whether the caller may send a frame now, before all others. Then it must
        ``release``."""
        with self._changed:
            counted = frame.kind in COUNTED
            if not self._is_idle or self._is_claimed or (counted and not self._credit):
                return False
            self._credit -= counted
            self._is_claimed = True
            return True

    def release(self, begun: Begun | None) -> None:
        """End a claim. A frame of which pieces are left comes next."""
        with self._changed:
            self._is_claimed, self._begun = False, begun
            if begun is not None or not self._is_idle:
                self.wake()

    def credit(self, count: int) -> None:
        """Allow ``count`` more activations or gradients, but no more than ``WINDOW``."""
        with self._changed:
            self._credit = min(self._credit + count, WINDOW)
            if self._tensors:
                self.wake()

    def close(self) -> None:
        """Let ``next`` return None once no frame is left that needs no credit."""
        with self._changed:
            self.is_closed = True
            self.wake()

    def wake(self) -> None:
        """Let ``next`` look again."""
        with self._changed:
            self._is_idle = False
            self._changed.notify()

    def next(
        self, under_way: bool, until: Callable[[], bool] | None
    ) -> Begun | Frame | Callable[[], Frame] | None:
        """Return what to send next: a frame, what is left of one, or the function that makes a
        part.

        Returns None if the stream is closed, if a part is ``under_way`` and no frame may overtake
        it, or if nothing is queued and ``until`` returns true.
        """
        with self._changed:
            while True:
                while self._is_claimed:
                    self._changed.wait()
                if self._begun is not None:
                    begun, self._begun = self._begun, None
                    return begun
                if self._urgent:
                    return self._urgent.popleft()
                if self.is_closed:
                    return None
                if self._tensors and self._credit:
                    self._credit -= 1
                    return self._tensors.popleft()
                if under_way:
                    return None
                if self._parts:
                    return self._parts.popleft()
                if until is not None and until():
                    return None
                self._is_idle = True
                self._changed.wait()
