"""What a control unit and a device tell each other beside tensors: plain values, checked."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.plan import Span
from collapipe.sections import CountFrom0, NotNegative, OptimizerSettings
from collapipe.state import Precision

T = TypeVar("T")
SERVICE = "collapipe.Device"
CONTROL = f"/{SERVICE}/Control"  # a stream of a control unit: segments, one after another
HOP = f"/{SERVICE}/Pass"  # a stream of a neighbour: activations and gradients
SESSION, SIDE = "collapipe-session", "collapipe-side"  # metadata of HOP
BEFORE, BEHIND = "before", "behind"  # where the caller of HOP stands

MOST_BLOCKS = 512  # of a model: four times those of the deepest one that is known
MOST_JSON_BYTES = 2**18  # of a message
_MOST_ACTIONS = 2**16  # segments times micro-batches: a schedule of so many is built in a second
Text = Annotated[str, Field(max_length=256)]  # a name, an address, a secret
Stages = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device, and HOST:PORT where it listens."""

    name: Text
    address: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDescription:
    """What all segments of a round have in common, whatever the plan.

    ``epoch`` counts the round's plans. ``model`` is what ``models.description`` makes. ``frozen``
    has the digests of blocks' frozen weights, which follow only where the device lacks them. With
    ``replicate_every`` r the device sends its parts after each r-th step; 0: only when asked.
    """

    version: Text
    unit: CountFrom0
    round: Annotated[int, Field(ge=0, lt=2**32)]  # as a frame has it, and the epoch
    epoch: Annotated[int, Field(ge=0, lt=2**16)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    model: Mapping[str, Any]
    recompute: bool
    dtype: Text
    wire_dtype: Precision = "float32"
    optimizer: OptimizerSettings
    replicate_every: CountFrom0
    frozen: Mapping[Text, Text] = field(default_factory=dict)

    def for_blocks(self, names: Collection[str]) -> dict[str, Any]:
        """The fields, as the description of a segment with these blocks has them."""
        common = {each.name: getattr(self, each.name) for each in fields(self)}
        return common | {"frozen": {k: v for k, v in self.frozen.items() if k in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDescription(RoundDescription):
    """All that a device must know of its segment, but for the weights.

    ``session`` is a secret of this segment's streams, ``next_session`` what the next one has made
    of its own for this side. ``memory_bytes`` is what the planner expects
    to be needed. ``next`` is None where the control unit dials. Blocks are as they were after step
    ``base``, -1: at the round's start; a device that has some keeps them. Raises ``WireError`` for
    more blocks than ``MOST_BLOCKS``, or a schedule that would take long to build.
    """

    session: Text
    span: Span
    stage: Stages
    num_segments: Stages
    num_micro_batches: Annotated[int, Field(ge=1, le=4096)]
    schedule: Text
    memory_bytes: NotNegative
    next_session: Text | None
    next: DeviceAddress | None
    base: Annotated[int, Field(ge=-1, lt=2**32)]

    def __post_init__(self) -> None:
        actions = self.num_segments * self.num_micro_batches
        if self.span.stop > MOST_BLOCKS or actions > _MOST_ACTIONS:
            raise WireError(
                f"blocks up to {self.span.stop:,}, {actions:,} segments times micro-batches; at "
                f"most {MOST_BLOCKS:,} and {_MOST_ACTIONS:,}"
            )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a device lacks of its segment: blocks, and those of them whose ``frozen`` weights must
    come as well."""

    blocks: tuple[str, ...]
    frozen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a device cannot go on: a kind of error, its line, and on which side the neighbour stands
    whose fault it may be."""

    kind: str
    message: str
    side: str | None = None


def secret_for(session: str, side: str) -> str:
    """What opens a segment's stream from one ``side``, and does not tell what opens the other."""
    return hashlib.sha256(f"{side} {session}".encode()).hexdigest()


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
    if len(data) > MOST_JSON_BYTES:
        raise WireError(f"{kind.__name__}: {len(data):,} bytes; at most {MOST_JSON_BYTES:,}")
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
    return as_view(data).tobytes()


def as_view(data: Tensor) -> memoryview:
    """The same where they lie."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"{data.dtype} {list(data.shape)} instead of bytes")
    return data.numpy().data
