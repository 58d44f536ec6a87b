"""Messages and numbers as tensors of a frame, checked when they are read."""

from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.validation import fault_of
from collapipe.wire.frames import Frame
from pipeline.stage import Shapes

T = TypeVar("T")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
MOST_JSON_BYTES = 2**18  # of a message
_MOST_ROWS = 2**31  # of a batch


def packed(message: object) -> Tensor:
    """Return a message as JSON in a tensor of bytes."""
    return as_tensor(as_json(message))


def unpacked(kind: type[T], data: Tensor) -> T:
    """Return the message that ``packed`` encoded. Raises ``WireError`` if it is invalid."""
    return from_json(kind, as_bytes(data))


def as_json(message: object) -> bytes:
    """Return a message as JSON."""
    return _adapter(type(message)).dump_json(message)


def from_json(kind: type[T], data: bytes) -> T:
    """Return the message that ``as_json`` encoded. Raises ``WireError`` if it is invalid."""
    if len(data) > MOST_JSON_BYTES:
        raise WireError(f"{kind.__name__}: {len(data):,} bytes; at most {MOST_JSON_BYTES:,}")
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise WireError(f"{kind.__name__}: {fault_of(error)}") from error
    except Exception as error:  # raised by the message's __post_init__
        raise WireError(f"{kind.__name__}: {one_line(error)}") from error


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the kind's adapter, which takes longer to make than most messages travel."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor [n]."""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def as_bytes(data: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor [n]. Raises ``WireError`` for any other tensor."""
    return as_view(data).tobytes()


def as_view(data: Tensor) -> memoryview:
    """Return a view of a uint8 tensor's bytes, as ``as_bytes`` does but without a copy."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"{data.dtype} {list(data.shape)} instead of bytes")
    return data.numpy().data


def numbers(frame: Frame, count: int) -> list[float]:
    """Return the finite numbers of a frame's one tensor. Raises ``WireError`` unless it has
    ``count`` of them."""
    (tensor,) = frame.only(1)
    if tensor.numel() != count or tensor.dim() > 1 or not bool(tensor.isfinite().all()):
        raise WireError(f"{frame.kind.name} of {list(tensor.shape)}, expected {count} numbers")
    found: list[float] = tensor.flatten().tolist()
    return found


def shapes(frame: Frame, most: int) -> Shapes:
    """Return the rows and positions of each micro-batch of a step. Raises ``WireError`` if they are
    invalid, or not 1 to ``most``."""
    (tensor,) = frame.only(1)
    fits = tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[1] == 2
    if not fits or not 1 <= len(tensor) <= most:
        raise WireError(
            f"BEGIN of {tensor.dtype} {list(tensor.shape)}, expected 1 … {most} micro-batches"
        )
    found: list[tuple[int, int]] = [(rows, positions) for rows, positions in tensor.tolist()]
    if min(map(min, found)) < 1 or sum(rows for rows, _ in found) > _MOST_ROWS:
        raise WireError(f"BEGIN of shapes {min(found)} to {max(found)}")
    return found
