"""What a control unit asks of a device beside training: how it is, and how fast its hops are.

A device is probed by who shows a ticket, once for each that its ``Status`` has given to a control
unit: so the certificate of another device alone moves no bytes here.
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

PROBE_FRAME_BYTES = 8 * 2**20  # of one message
PROBE_BYTES = 128 * 2**20  # of all messages of a probe, one way
PROBE_S = 10.0  # that a probe takes
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MOST_SIZES, _MOST_REPEATS = 8, 100


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """How a device is now.

    ``flops_per_s`` is what products of matrices reach, None while a segment is trained or a hop is
    probed. ``unit`` and ``span`` say whose blocks are trained, where they have come already.
    """

    name: str
    version: str
    torch_version: str
    torch_device: str
    threads: int
    memory_bytes: Finite  # that it gives
    free_bytes: Finite  # that the machine has left
    flops_per_s: Finite | None
    expires: AwareDatetime | None  # its certificate; None: it has none
    busy: bool
    unit: int | None
    span: Span | None
    ticket: str


@dataclass(frozen=True, slots=True)
class HopRequest:
    """Send messages of these sizes to ``target`` and wait for each to come back, ``repeats`` times
    and once before."""

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
    """The median time in which a message went to a neighbour and came back."""

    num_bytes: Annotated[int, Field(ge=1, le=PROBE_FRAME_BYTES)]  # each way
    seconds: Finite


@dataclass(frozen=True, slots=True)
class HopTimes:
    """A trip for each size, the smallest first; those that would last too long are left out."""

    trips: Annotated[tuple[Trip, ...], Field(min_length=1)]
