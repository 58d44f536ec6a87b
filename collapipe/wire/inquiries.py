"""Requests of a control unit to a device outside training: its status and its hops' speed.

A probe needs a ticket, which is valid once. A device issues tickets to control units in its
``DeviceStatus``, so another device cannot start a probe with its certificate alone.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AwareDatetime, Field

from collapipe.errors import WireError
from collapipe.plan import Span
from collapipe.wire.segments import SERVICE, DeviceAddress

STATUS = f"/{SERVICE}/Status"  # nothing → DeviceStatus
PROBE = f"/{SERVICE}/Probe"  # a stream that echoes activations as gradients
TIME_HOP = f"/{SERVICE}/TimeHop"  # HopRequest → HopTimes
TICKET = "collapipe-ticket"  # metadata of PROBE

PROBE_FRAME_BYTES = 8 * 2**20  # most bytes of one message
PROBE_BYTES = 128 * 2**20  # most bytes of all messages of a probe, one way
PROBE_S = 10.0  # most seconds that a probe takes
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MOST_SIZES, _MOST_REPEATS = 8, 100


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's current status.

    ``flops_per_s`` is the measured speed of matrix products; None while the device trains a segment
    or probes a hop. ``unit`` and ``span`` say whose blocks it trains; None if it has no segment.
    """

    name: str
    version: str
    torch_version: str
    torch_device: str
    threads: int
    memory_bytes: Finite  # that the device offers
    free_bytes: Finite  # free memory of the machine
    flops_per_s: Finite | None
    expires: AwareDatetime | None  # of its certificate; None without one
    busy: bool
    unit: int | None
    span: Span | None
    ticket: str


@dataclass(frozen=True, slots=True)
class HopRequest:
    """Request to measure the round trip of messages of these sizes to ``target``.

    Each size is sent once to warm up, then ``repeats`` times.
    """

    target: DeviceAddress
    ticket: str
    sizes: tuple[int, ...]
    repeats: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= _MOST_SIZES or not 1 <= self.repeats <= _MOST_REPEATS:
            raise WireError(
                f"{len(self.sizes)} sizes, {self.repeats} repeats; at most {_MOST_SIZES} and "
                f"{_MOST_REPEATS}"
            )
        if min(self.sizes) < 1 or max(self.sizes) > PROBE_FRAME_BYTES:
            raise WireError(f"a message of {max(self.sizes):,} bytes; 1 … {PROBE_FRAME_BYTES:,}")


@dataclass(frozen=True, slots=True)
class Trip:
    """The median round-trip time of a message to a neighbour."""

    num_bytes: Annotated[int, Field(ge=1, le=PROBE_FRAME_BYTES)]  # each way
    seconds: Finite


@dataclass(frozen=True, slots=True)
class HopTimes:
    """A trip for each size, the smallest first; sizes that would take too long are left out."""

    trips: Annotated[tuple[Trip, ...], Field(min_length=1)]
