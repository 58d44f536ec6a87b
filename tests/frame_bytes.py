"""Frames encoded in one piece."""

from collapipe.wire.frames import Frame, buffers


def encode(frame: Frame) -> bytes:
    """Return the frame's bytes."""
    return b"".join(buffers(frame))
