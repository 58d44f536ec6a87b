"""Encode and decode frames, the data plane's messages: header, tensor shapes, then raw bytes.

All sizes are checked against the received bytes before a tensor is allocated. So a message that
claims a large size takes no memory beyond its own length. Layout, little-endian:

    "CPF3" | kind u8 | tensors u8 | epoch u16 | round u32 | step u32 | micro-batch u32
    offset of the first tensor's bytes u32
    per tensor: dtype u8 | dimensions u8 | 0 u16 | sizes u32 each
    zeros up to a multiple of 64, then each tensor's bytes, followed by zeros up to one of 8

A step's frames differ in little but their tensors' bytes, and interpreted code is slow between two
computations, because their data occupies the processor's caches. So what follows from dtypes and
shapes is computed once.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.tensors import ALIGNMENT, aligned
from collapipe.wire.parts import raw

MAGIC = b"CPF3"
MAX_TENSORS = 8
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**40  # sizes of 0 count as 1, because torch multiplies the others for strides
_HEADER = struct.Struct("<4sBBHIIII")
_SHAPE = struct.Struct("<BBH")
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16),
    *(torch.int64, torch.bool, torch.int8, torch.uint8),
)
_MOST_HEAD = 320  # bytes before the first tensor, with as many tensors and dimensions as possible
_KNOWN_FORMS = 64  # dtypes and shapes of a frame's tensors that are remembered
_AT_ONCE = 2**14  # bytes

Layout = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: dtype and shape


class _Place(NamedTuple):
    """Where a tensor's bytes are in a frame."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    elements: int


class FrameKind(IntEnum):
    """The content of a frame, and its tensors."""

    # A step: between neighbours in a pipeline, and between a control unit and a decoder
    BEGIN = 1  # a step begins: shape of each micro-batch; for a decoder their number, target tokens
    ACTIVATION = 2  # a segment's encoded output, and its mask; for a decoder also targets
    GRADIENT = 3  # the gradient of an activation; from a decoder after the micro-batch's loss
    NORMS = 4  # squared gradient norms of the sender's parts; from a device also its measurements
    CREDIT = 12  # nothing: its piece says how many of these the receiver has taken
    RESUME = 15  # where a broken link continues: the last finished step, and the head's norm
    # From a control unit to a device
    LOAD = 6  # a segment's description, as JSON
    OPEN = 9  # dial the next device
    STEP = 10  # learning rate and the gradients' factor
    STATE = 11  # send the parts' state
    # From a device to a control unit
    WANTED = 17  # the answer to LOAD: blocks of the segment that the device lacks, as JSON
    READY = 8  # the segment's streams are open
    BUILT = 18  # the segment has all its weights
    FAILED = 13  # why the sender cannot continue, as JSON
    ALIVE = 14  # seconds of current work and since the last one, the step's finished actions
    # In both directions
    PART = 7  # tensors of a block as safetensors, after their header as JSON
    CLOCK = 16  # ask for the time; in the answer the sender's clock, in seconds


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: its kind, its place in the training, and up to ``MAX_TENSORS`` tensors.

    ``epoch`` counts the plans of a round: a cluster that lost a device begins a new one. ``step``
    and ``micro_batch`` are 0 if the message belongs to none.
    """

    kind: FrameKind
    round: int
    step: int
    micro_batch: int
    tensors: tuple[Tensor, ...] = ()
    epoch: int = 0

    def only(self, count: int) -> tuple[Tensor, ...]:
        """Return the tensors. Raises ``WireError`` if their number is not ``count``."""
        if len(self.tensors) != count:
            raise WireError(f"{self.kind.name} with {len(self.tensors)} tensors, expected {count}")
        return self.tensors


_KINDS = {int(kind): kind for kind in FrameKind}


def buffers(frame: Frame) -> list[bytes | memoryview]:
    """Return buffers with the frame's bytes; the tensors' bytes are not copied.

    Raises ``WireError`` if it has an unsupported dtype, too many dimensions or too many tensors.
    """
    shapes = _packed(tuple([(each.dtype, each.shape) for each in frame.tensors]))
    head = _HEADER.pack(
        *(MAGIC, frame.kind, len(frame.tensors), frame.epoch),
        *(frame.round, frame.step, frame.micro_batch, _HEADER.size + len(shapes)),
    )
    found: list[bytes | memoryview] = [head, shapes]
    for tensor in frame.tensors:
        data = raw(tensor)
        found += data, bytes(-len(data) % 8)
    return found


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that ``data`` encodes. Raises ``WireError`` before it allocates any memory.

    Tensors share the memory of ``data``, except unaligned floating-point ones. Data that cannot be
    written to is copied once.
    """
    if len(data) < _HEADER.size:
        raise WireError(f"truncated frame: {len(data)} bytes, a header has {_HEADER.size}")
    magic, kind, count, epoch, round_, step, micro_batch, start = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"not a frame: starts with {magic!r}, expected {MAGIC!r}")
    if kind not in _KINDS:
        raise WireError(f"unknown kind of frame: {kind}")
    if count > MAX_TENSORS:
        raise WireError(f"frame of {count} tensors; at most {MAX_TENSORS}")
    if not _HEADER.size <= start <= min(len(data), _MOST_HEAD):
        raise WireError(f"a frame of {len(data)} bytes whose tensors begin at byte {start}")
    buffer = memoryview(data)
    places, expected = _places(buffer[_HEADER.size : start].tobytes(), count)
    if len(data) != expected:
        raise WireError(f"frame of {len(data)} bytes; its header says {expected}")
    if buffer.readonly and count:  # torch may write to it
        buffer = memoryview(bytearray(data))
    tensors = tuple([_tensor(buffer, place) for place in places])
    return Frame(_KINDS[kind], round_, step, micro_batch, tensors, epoch)


def num_bytes(layouts: Sequence[Layout]) -> int:
    """Return the length in bytes of a frame that holds tensors of these dtypes and shapes."""
    return _HEADER.size + len(_packed(tuple(layouts))) + sum(_up(_size(each)) for each in layouts)


def size(frame: Frame) -> int:
    """Return the length of the encoded frame in bytes."""
    return num_bytes([(each.dtype, tuple(each.shape)) for each in frame.tensors])


@lru_cache(_KNOWN_FORMS)
def _packed(layouts: tuple[Layout, ...]) -> bytes:
    """Return what follows a header: dtypes and shapes, and the zeros before the first tensor."""
    if len(layouts) > MAX_TENSORS:
        raise WireError(f"a frame holds at most {MAX_TENSORS} tensors, got {len(layouts)}")
    packed = b""
    for dtype, shape in layouts:
        if dtype not in _DTYPES or len(shape) > MAX_DIMENSIONS:
            raise WireError(f"a frame cannot carry {dtype} with {len(shape)} dimensions")
        packed += _SHAPE.pack(_DTYPES.index(dtype), len(shape), 0)
        packed += struct.pack(f"<{len(shape)}I", *shape)
    return packed + bytes(-(_HEADER.size + len(packed)) % ALIGNMENT)


@lru_cache(_KNOWN_FORMS)
def _places(packed: bytes, count: int) -> tuple[tuple[_Place, ...], int]:
    """Return where the bytes of a frame's tensors are, from what follows its header, and the
    frame's length."""
    layouts: list[Layout] = []
    offset = 0
    try:
        for _ in range(count):
            code, dimensions, _ = _SHAPE.unpack_from(packed, offset)
            if code >= len(_DTYPES) or dimensions > MAX_DIMENSIONS:
                raise WireError(f"unknown dtype {code} or too many dimensions ({dimensions})")
            shape = struct.unpack_from(f"<{dimensions}I", packed, offset + _SHAPE.size)
            if math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
                raise WireError(f"a tensor of shape {list(shape)}; at most {MAX_ELEMENTS} elements")
            layouts.append((_DTYPES[code], shape))
            offset += _SHAPE.size + 4 * dimensions
    except struct.error as error:
        raise WireError(f"truncated frame: {len(packed)} bytes end inside its shapes") from error
    first, actual = (_HEADER.size + len(each) for each in (_packed(tuple(layouts)), packed))
    if actual != first:
        raise WireError(f"a frame whose tensors begin at byte {actual} instead of {first}")
    places, end = list[_Place](), first
    for layout in layouts:
        places.append(_Place(*layout, end, math.prod(layout[1])))
        end += _up(_size(layout))
    return tuple(places), end


def _tensor(buffer: memoryview, place: _Place) -> Tensor:
    dtype, shape, offset, elements = place
    if not elements:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and not _are_truth_values(buffer[offset : offset + elements]):
        raise WireError("a truth value other than 0 or 1")
    tensor = torch.frombuffer(buffer, dtype=dtype, count=elements, offset=offset).view(shape)
    return aligned(tensor) if dtype.is_floating_point else tensor


def _are_truth_values(data: memoryview) -> bool:
    starts = range(0, len(data), _AT_ONCE)  # copies are short
    return not any(bytes(data[at : at + _AT_ONCE]).translate(None, b"\0\1") for at in starts)


def _size(layout: Layout) -> int:
    dtype, shape = layout
    return math.prod(shape) * dtype.itemsize


def _up(size: int) -> int:
    return -(-size // 8) * 8
