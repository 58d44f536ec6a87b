"""Frames as they travel, in one piece."""

from collapipe.wire.frames import Frame, buffers


def encode(frame: Frame) -> bytes:
    """The frame's bytes."""
    return b"".join(buffers(frame))
