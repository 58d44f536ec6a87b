"""Encode and decode frames, the data plane's messages: header, tensor shapes, then raw bytes.

All sizes are checked against the received bytes before a tensor is allocated. So a message that
claims a large size takes no memory beyond its own length. Layout, little-endian:

    "CPF2" | kind u8 | tensors u8 | epoch u16 | round u32 | step u32 | micro-batch u32
    per tensor: dtype u8 | dimensions u8 | 0 u16 | sizes u32 each
    zeros up to a multiple of 8, then each tensor's bytes, each followed by zeros likewise
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.tensors import aligned
from collapipe.wire.parts import raw

MAGIC = b"CPF2"
MAX_TENSORS = 8
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**40  # sizes of 0 count as 1, because torch multiplies the others for strides
_HEADER = struct.Struct("<4sBBHIII")
_SHAPE = struct.Struct("<BBH")
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16),
    *(torch.int64, torch.bool, torch.int8, torch.uint8),
)
_ALIGNMENT = 8

Layout = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: dtype and shape


class FrameKind(IntEnum):
    """The content of a frame, and its tensors."""

    # A step: between neighbours in a pipeline, and between a control unit and a decoder
    BEGIN = 1  # a step begins: shape of each micro-batch; for a decoder their number, target tokens
    ACTIVATION = 2  # a segment's encoded output, and its mask; for a decoder also targets
    GRADIENT = 3  # the gradient of an activation; from a decoder after the micro-batch's loss
    NORMS = 4  # squared gradient norms of the sender's parts; from a device also its measurements
    CREDIT = 12  # the receiver has taken ``streams.CREDITED`` of these, up to this micro-batch
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


def buffers(frame: Frame) -> list[memoryview]:
    """Return buffers with the frame's bytes; the tensors' bytes are not copied.

    Raises ``WireError`` if it has an unsupported dtype, too many dimensions or too many tensors.
    """
    if len(frame.tensors) > MAX_TENSORS:
        raise WireError(f"a frame holds at most {MAX_TENSORS} tensors, got {len(frame.tensors)}")
    head = [
        _HEADER.pack(
            *(MAGIC, frame.kind, len(frame.tensors), frame.epoch),
            *(frame.round, frame.step, frame.micro_batch),
        )
    ]
    bodies: list[memoryview] = []
    for tensor in frame.tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > MAX_DIMENSIONS:
            raise WireError(f"a frame cannot carry {tensor.dtype} with {tensor.dim()} dimensions")
        head.append(_SHAPE.pack(_DTYPES.index(tensor.dtype), tensor.dim(), 0))
        head.append(struct.pack(f"<{tensor.dim()}I", *tensor.shape))
        bodies += _padded(raw(tensor))
    return [*_padded(memoryview(b"".join(head))), *bodies]


def decode(data: bytes | bytearray) -> Frame:
    """Return the frame that ``data`` encodes. Raises ``WireError`` before it allocates any memory.

    Tensors of a ``bytearray`` share its memory, except unaligned floating-point ones. ``bytes``
    are copied once.
    """
    if len(data) < _HEADER.size:
        raise WireError(f"truncated frame: {len(data)} bytes, a header has {_HEADER.size}")
    magic, kind, count, epoch, round_, step, micro_batch = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"not a frame: starts with {magic!r}, expected {MAGIC!r}")
    if kind not in FrameKind.__members__.values():
        raise WireError(f"unknown kind of frame: {kind}")
    if count > MAX_TENSORS:
        raise WireError(f"frame of {count} tensors; at most {MAX_TENSORS}")
    layouts, offset = _layouts(data, count)
    expected = num_bytes(layouts)
    if len(data) != expected:
        raise WireError(f"frame of {len(data)} bytes; its header says {expected}")
    tensors = _tensors(data, offset, layouts)
    return Frame(FrameKind(kind), round_, step, micro_batch, tensors, epoch)


def num_bytes(layouts: Sequence[Layout]) -> int:
    """Return the length in bytes of a frame that holds tensors of these dtypes and shapes."""
    head = _HEADER.size + sum(_SHAPE.size + 4 * len(shape) for _, shape in layouts)
    return _up(head) + sum(_up(_size(layout)) for layout in layouts)


def size(frame: Frame) -> int:
    """Return the length of the encoded frame in bytes."""
    return num_bytes([(each.dtype, tuple(each.shape)) for each in frame.tensors])


def _layouts(data: bytes | bytearray, count: int) -> tuple[list[Layout], int]:
    """Return dtypes and shapes, and the offset of the first tensor's bytes."""
    layouts: list[Layout] = []
    offset = _HEADER.size
    for _ in range(count):
        try:
            code, dimensions, _ = _SHAPE.unpack_from(data, offset)
            shape = struct.unpack_from(f"<{dimensions}I", data, offset + _SHAPE.size)
        except struct.error as error:
            raise WireError(f"truncated frame: {len(data)} bytes end inside its shapes") from error
        if code >= len(_DTYPES) or dimensions > MAX_DIMENSIONS:
            raise WireError(f"unknown dtype {code} or too many dimensions ({dimensions})")
        if math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
            raise WireError(f"a tensor of shape {list(shape)}; at most {MAX_ELEMENTS} elements")
        layouts.append((_DTYPES[code], shape))
        offset += _SHAPE.size + 4 * dimensions
    return layouts, _up(offset)


def _tensors(data: bytes | bytearray, offset: int, layouts: Sequence[Layout]) -> tuple[Tensor, ...]:
    buffer = data if isinstance(data, bytearray) else bytearray(data)  # torch may write to it
    tensors = []
    for dtype, shape in layouts:
        size = _size((dtype, shape))
        if size == 0:
            tensors.append(torch.empty(shape, dtype=dtype))
        else:
            flat = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
            if dtype is torch.bool and int(flat.max()) > 1:
                raise WireError("a truth value other than 0 or 1")
            tensor = flat.view(dtype).reshape(shape)
            tensors.append(aligned(tensor) if dtype.is_floating_point else tensor)
        offset += _up(size)
    return tuple(tensors)


def _padded(data: memoryview) -> list[memoryview]:
    """Return the data and the zeros that pad it."""
    return [data, memoryview(bytes(_up(len(data)) - len(data)))]


def _size(layout: Layout) -> int:
    dtype, shape = layout
    return math.prod(shape) * dtype.itemsize


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
