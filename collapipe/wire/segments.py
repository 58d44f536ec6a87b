"""What a control unit and a device tell each other beside tensors: plain values, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.plan import Span
from collapipe.sections import OptimizerSettings

T = TypeVar("T")
CONTROL = "/collapipe.Device/Control"  # a stream of a control unit: one segment
HOP = "/collapipe.Device/Pass"  # a stream of a neighbour: activations and gradients
SESSION, SIDE = "collapipe-session", "collapipe-side"  # metadata of HOP
BEFORE, BEHIND = "before", "behind"  # where the caller of HOP stands


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The device that holds the next segment."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class SegmentDescription:
    """All that a device must know of its segment, but for the weights.

    ``session`` is a secret of this segment's streams; ``epoch`` counts the round's plans. ``model``
    is what ``models.description`` makes. ``memory_bytes`` is what the planner expects to be needed.
    ``next`` is None where the control unit dials. With ``replicate_every`` r the device sends its
    parts after each r-th step; 0: only when asked.
    """

    version: str
    session: str
    unit: int
    round: int
    epoch: int
    seed: int
    model: Mapping[str, Any]
    span: Span
    stage: int
    num_segments: int
    num_micro_batches: int
    schedule: str
    recompute: bool
    dtype: str
    optimizer: OptimizerSettings
    memory_bytes: float
    next_session: str | None
    next: Neighbour | None
    replicate_every: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a device cannot go on: a kind of error, its line, and on which side the neighbour stands
    whose fault it may be."""

    kind: str
    message: str
    side: str | None = None


def packed(message: object) -> Tensor:
    """A message as JSON in a tensor of bytes."""
    return as_tensor(as_json(message))


def unpacked(kind: type[T], data: Tensor) -> T:
    """The message of ``packed``. Raises ``WireError``."""
    return from_json(kind, as_bytes(data))


def as_json(message: object) -> bytes:
    """A message as JSON."""
    text: bytes = TypeAdapter(type(message)).dump_json(message)
    return text


def from_json(kind: type[T], data: bytes) -> T:
    """The message of ``as_json``. Raises ``WireError``."""
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part)[:40] for part in fault["loc"])
        raise WireError(f"{kind.__name__}: {where}: {one_line(fault['msg'])}") from error
    except Exception as error:  # its own checks
        raise WireError(f"{kind.__name__}: {one_line(error)}") from error


def as_tensor(data: bytes) -> Tensor:
    """Bytes as uint8 [n]."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def as_bytes(data: Tensor) -> bytes:
    """The bytes of a uint8 [n]. Raises ``WireError`` for another tensor."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"{data.dtype} {list(data.shape)} instead of bytes")
    return data.numpy().tobytes()
