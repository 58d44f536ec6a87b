"""Cut frames into pieces that gRPC sends, and join received ones.

A piece begins with a byte that says whether it ends its frame, and whether that frame is a part:
other frames may come between the pieces of a part. Its upper half is a number of credits, which
allow as many more frames in the other direction.
"""

from collections.abc import Iterator

from collapipe.errors import WireError
from collapipe.wire import frames
from collapipe.wire.frames import Frame, FrameKind

PIECE_BYTES = 512 * 1024  # most of a piece, without its first byte
_LEAST_PIECE_BYTES = 64 * 1024  # smallest piece, for a slow link
_SLOW_S, _QUICK_S = 0.25, 0.05  # after a slow piece pieces get smaller, and larger after
_MANY_QUICK = 8  # this many quick pieces in a row; buffers accept the first few at once
_MORE, _LAST = 0, 1  # first byte of a piece
_PART = 2  # added to the first byte for a piece of a part
_CREDIT, MOST_CREDITS = 16, 15  # added for each credit


class Cutter:
    """Cuts frames into pieces, of which one takes neither long nor much processor time."""

    def __init__(self) -> None:
        self._size, self._quick = _LEAST_PIECE_BYTES, 0  # of the next piece; quick ones in a row

    def pieces(self, frame: Frame, credits: int = 0) -> Iterator[bytes]:
        """Yield a frame's bytes in pieces, the first with at most ``MOST_CREDITS`` credits. Each
        piece is copied once, when it is yielded."""
        lane = _CREDIT * credits + (_PART if frame.kind == FrameKind.PART else 0)
        piece, room = list[bytes | memoryview](), self._size
        for buffer in frames.buffers(frame):
            start = 0
            while len(buffer) - start > room:
                yield b"".join((bytes([lane | _MORE]), *piece, buffer[start : start + room]))
                start += room
                piece, room, lane = [], self._size, lane % _CREDIT
            piece.append(buffer[start:])
            room -= len(buffer) - start
        yield b"".join((bytes([lane | _LAST]), *piece))

    def adapt(self, size: int, seconds: float) -> None:
        """Choose the size of the next pieces, after gRPC has taken a message of this ``size`` in so
        many ``seconds``."""
        if seconds > _SLOW_S:
            self._size, self._quick = max(self._size // 2, _LEAST_PIECE_BYTES), 0
        elif seconds < _QUICK_S and size > self._size:
            self._quick += 1
            if self._quick == _MANY_QUICK:
                self._size, self._quick = min(2 * self._size, PIECE_BYTES), 0


class Joiner:
    """Joins the pieces of frames; a part and another frame may be under way at the same time."""

    def __init__(self) -> None:
        self._lanes = {0: bytearray(), _PART: bytearray()}

    def joined(self, piece: bytes | memoryview, max_bytes: int) -> bytearray | memoryview | None:
        """Return the bytes of the frame that a piece ends; None if others will follow. A frame of
        one piece is not copied.

        Raises ``WireError`` before it keeps more than ``max_bytes`` of one frame, and for a message
        that is no piece.
        """
        if not piece or piece[0] % _CREDIT > _PART | _LAST or len(piece) > PIECE_BYTES + 1:
            raise WireError(f"a message of {len(piece):,} bytes is not a piece of a frame")
        lane, data = piece[0] & _PART, memoryview(piece)[1:]
        if len(self._lanes[lane]) + len(data) > max_bytes:
            raise WireError(f"a frame of more than {max_bytes:,} bytes")
        if piece[0] & _LAST and not self._lanes[lane]:
            return data
        self._lanes[lane] += data
        if not piece[0] & _LAST:
            return None
        whole, self._lanes[lane] = self._lanes[lane], bytearray()
        return whole


def credits_of(piece: bytes | memoryview) -> int:
    """Return the credits that a piece brings."""
    return piece[0] // _CREDIT
