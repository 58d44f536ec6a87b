"""What a device does, as its signs of life report it."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from collapipe.wire.frames import Frame, FrameKind


@dataclass
class Activity:
    """The current work of a device.

    ``busy_since`` is when its current action began, None between actions. ``moved_s`` is when it
    last began or ended work. ``progress``, which is replaced as a whole, has a frame of the current
    step, and its finished actions; one more once own gradients are on their way.
    """

    busy_since: float | None = None
    moved_s: float = field(default_factory=time.monotonic)
    progress: tuple[Frame, int] = Frame(FrameKind.ALIVE, 0, 0, 0), 0

    def set_busy(self, since: float | None) -> None:
        """Begin an action, or end it with None."""
        self.busy_since, self.moved_s = since, time.monotonic()

    @contextmanager
    def busy(self, after_s: float = 0.0) -> Iterator[None]:
        """Mark the device as busy; signs of life report its busy seconds minus ``after_s``."""
        before = self.busy_since
        self.set_busy(time.monotonic() + after_s)
        try:
            yield
        finally:
            self.set_busy(before)

    def sign_of_life(self, streams_moved_s: Iterable[float]) -> Frame:
        """Return the frame that reports the seconds of the current action, the seconds since
        anything was computed, dialled, sent or received, and the finished actions."""
        since, now = self.busy_since, time.monotonic()
        busy_s = 0.0 if since is None else max(0.0, now - since)
        still_s = 0.0 if since is not None else now - max(self.moved_s, *streams_moved_s)
        step, finished = self.progress
        alive = torch.tensor([busy_s, still_s, finished], dtype=torch.float64)
        return replace(step, kind=FrameKind.ALIVE, tensors=(alive,))


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes; it may be the parent's peak if that was
    larger."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
