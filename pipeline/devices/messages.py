"""Messages between a control unit and a device, apart from tensors: plain, validated values.

``FrameKind`` says which frame carries which message.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from collapipe.errors import WireError, one_line
from collapipe.models.description import MOST_BLOCKS
from collapipe.plan import Span
from collapipe.process.host import Host
from collapipe.row_shares import common_rows, connected, leaders
from collapipe.sections import CountFrom0, NotNegative, OptimizerSettings
from collapipe.state import HopPrecision
from collapipe.wire.device_address import DeviceAddress, Text

SERVICE = "collapipe.Device"
CONTROL = f"/{SERVICE}/Control"  # a control unit's stream: segments, one after another
HOP = f"/{SERVICE}/Pass"  # a neighbour's stream: activations and gradients
STATUS = f"/{SERVICE}/Status"  # a request: nothing, or BRIEF → DeviceStatus
BRIEF = b"brief"  # asks for no speed, which takes time to measure
SESSION, NEIGHBOUR = "collapipe-session", "collapipe-neighbour"  # metadata of HOP
BEFORE, SHARE, BEHIND = "before", "share", "behind"  # a neighbour's stage, from this device's one

FRAME_SHARE = 8  # a hop's frame has at most this fraction of the memory: each block keeps more
_MOST_ACTIONS = 2**16  # segments times micro-batches: building such a schedule takes a second
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rows = Annotated[int, Field(ge=1, lt=2**31)]
_MOST_SHARES = 128  # devices of a cluster
_HEADER_BYTES = 2**16  # and other bytes of a frame that do not depend on its rows
Line = Annotated[str, AfterValidator(one_line)]  # printable, and short: each reader takes its time
Stages = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDescription:
    """The fields that all segments of a round have in common, for any plan.

    ``epoch`` counts the round's plans. ``model`` is made by ``models.description``. ``frozen`` has
    the digests of blocks' frozen weights, which are sent only if the device lacks them. With
    ``replicate_every`` r, the device sends its parts after each r-th step; 0: only on request.
    ``first_trained`` is the first block that trains, −1 if the embedding trains: only segments
    after it send gradients back.
    """

    version: Text
    unit: CountFrom0
    round: Annotated[int, Field(ge=0, lt=2**32)]  # range as in a frame's header
    epoch: Annotated[int, Field(ge=0, lt=2**16)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    model: Mapping[str, Any]
    recompute: bool
    dtype: Literal["float32", "bfloat16", "float64"]
    wire_dtype: HopPrecision = "float32"
    optimizer: OptimizerSettings
    replicate_every: CountFrom0
    first_trained: Annotated[int, Field(ge=-1, lt=MOST_BLOCKS)] = -1
    frozen: Mapping[Text, Text] = field(default_factory=dict)

    def for_blocks(self, names: Collection[str]) -> dict[str, Any]:
        """Return the fields for a segment of these blocks, with only their ``frozen`` digests."""
        common = {each.name: getattr(self, each.name) for each in fields(self)}
        return common | {"frozen": {k: v for k, v in self.frozen.items() if k in names}}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another device that this one dials, with its name as a ``neighbour`` and the ``secret`` of
    its stream."""

    address: DeviceAddress
    neighbour: Text
    secret: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDescription(RoundDescription):
    """A device's segment, without its weights.

    ``session`` is the secret for this segment's streams. ``memory_bytes`` is the planned memory.
    Weights are as of step ``base`` (-1: the round's start); a device reuses the blocks that it
    already has. ``shares`` are the planned rows of the segment's shares. ``cuts`` has the end of
    each device's range of shares; this device is number ``member``. ``rows_before`` and
    ``rows_behind`` are the planned rows of each device of the stages around this one; the control
    unit has all. This device dials the ``peers``; its other neighbours, or the control unit in
    their place, dial it. A block's leader steps it and has its optimiser state.

    Raises ``WireError`` for more blocks than ``MOST_BLOCKS``, or a schedule that would take long to
    build.
    """

    session: Text
    span: Span
    stage: Stages
    num_segments: Stages
    num_micro_batches: Annotated[int, Field(ge=1, le=4096)]
    schedule: Text
    memory_bytes: NotNegative
    base: Annotated[int, Field(ge=-1, lt=2**32)]
    shares: Annotated[tuple[Rows, ...], Field(min_length=1, max_length=_MOST_SHARES)] = (1,)
    cuts: Annotated[tuple[Rows, ...], Field(min_length=1, max_length=_MOST_SHARES)] = (1,)
    member: CountFrom0 = 0
    rows_before: Annotated[tuple[Rows, ...], Field(min_length=1, max_length=_MOST_SHARES)] = (1,)
    rows_behind: Annotated[tuple[Rows, ...], Field(min_length=1, max_length=_MOST_SHARES)] = (1,)
    peers: Annotated[tuple[Peer, ...], Field(max_length=2 * _MOST_SHARES)] = ()

    @property
    def neighbours(self) -> set[str]:
        """The names of all neighbours, with each of which this device has a stream."""
        ends = (BEFORE, self.rows_before), (BEHIND, self.rows_behind)
        pairs = ((side, each) for side, rows in ends for each in connected(self.rows, rows))
        found = {neighbour_name(side, place) for side, (own, place) in pairs if own == self.member}
        return found | {neighbour_name(SHARE, each) for each in self.others}

    def rows_with(self, side: str, total: int) -> list[tuple[int, int]]:
        """Return the range of own rows that each device of the stage ``before`` or ``behind`` has,
        of a micro-batch of ``total`` rows."""
        return common_rows(self.rows, self.member, self._rows_around(side), total)

    def _rows_around(self, side: str) -> tuple[int, ...]:
        """Return the planned rows of each device of the stage ``before`` or ``behind``."""
        return self.rows_before if side == BEFORE else self.rows_behind

    def most_bytes_from(self, name: str, most: int) -> int:
        """Return the limit in bytes of a frame from a neighbour before or behind this device,
        ``most`` for all rows of this device. Rounded shares of fewer rows may be twice as large."""
        at = place_of(name)
        assert at is not None  # the name of one of the neighbours
        side, place = at
        rows = self.rows_with(side, total=sum(self.rows) * sum(self._rows_around(side)))
        first, end = rows[place]
        return min(most, 2 * most * (end - first) // rows[-1][1] + _HEADER_BYTES)

    def shares_of(self, member: int) -> range:
        """Return the numbers of the shares that a device of the segment computes."""
        return range(self.cuts[member - 1] if member else 0, self.cuts[member])

    @property
    def others(self) -> list[int]:
        """The numbers of the segment's other devices."""
        return [each for each in range(len(self.cuts)) if each != self.member]

    @property
    def rows(self) -> list[int]:
        """The planned rows of each of the segment's devices."""
        owns = map(self.shares_of, range(len(self.cuts)))
        return [sum(self.shares[own.start : own.stop]) for own in owns]

    @property
    def leaders(self) -> list[int]:
        """The number of the device that leads each of the segment's blocks."""
        return leaders(self.rows, self.span.blocks)

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise((0, *self.cuts)))
        if not ascending or self.cuts[-1] != len(self.shares) or self.member >= len(self.cuts):
            raise WireError(f"device {self.member} of shares {self.cuts} of {len(self.shares)}")
        if not {peer.neighbour for peer in self.peers} <= self.neighbours:
            raise WireError(f"peers that are no neighbours of device {self.member}")
        actions = self.num_segments * self.num_micro_batches
        if self.span.stop > MOST_BLOCKS or actions > _MOST_ACTIONS:
            raise WireError(
                f"blocks up to {self.span.stop:,}, {actions:,} segments times micro-batches; at "
                f"most {MOST_BLOCKS:,} and {_MOST_ACTIONS:,}"
            )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ``blocks`` that a device lacks, and those of them whose ``frozen`` weights it lacks. Of
    the blocks in ``states`` it lacks only the optimiser state. ``host`` is the device's machine."""

    blocks: tuple[str, ...]
    frozen: tuple[str, ...]
    states: tuple[str, ...]
    host: Host


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The ``block`` of which a part has tensors, and the number of its parts that follow."""

    block: Text
    left: CountFrom0


@dataclass(frozen=True, slots=True)
class ShareHeader:
    """The content of a part that a device of a shared segment sends to another one, and the number
    of parts that follow. Gradients are those of a ``share`` for the blocks that the receiver leads,
    weights those after a step of the blocks that the sender leads."""

    role: Literal["gradients", "weights"]
    left: CountFrom0
    share: CountFrom0 = 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a device cannot continue: an error's class name and one-line message.

    ``neighbour`` is the name of the one that may have caused it.
    """

    kind: Text
    message: Line
    neighbour: Text | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's current status.

    ``flops_per_s`` is the measured speed of matrix products; None for a ``BRIEF`` status and while
    the device is busy for a control unit. ``unit`` and ``span`` say whose blocks it trains; None
    if it has no segment.
    """

    name: Line
    version: Line
    torch_version: Line
    torch_device: Line
    threads: int
    memory_bytes: Finite  # that the device offers
    free_bytes: Finite  # free memory of the machine, or of its GPU if ``torch_device`` is one
    flops_per_s: Finite | None
    expires: AwareDatetime | None  # of its certificate; None without one
    busy: bool
    unit: CountFrom0 | None
    span: Span | None

    def misfit(self, name: str, version: str) -> str | None:
        """Return why this is not the status of the device ``name`` with this version, or None."""
        if self.name != name:
            return f"its address belongs to {self.name}; correct name or address in the file"
        if self.version != version:
            return f"has CollaPipe {self.version}, here is {version}; install the same version"
        return None


def neighbour_name(side: str, place: int) -> str:
    """Return a device's name for the device number ``place`` of the stage on a ``side``; the
    control unit is number 0 before the first stage and behind the last one."""
    return f"{side}-{place}"


def place_of(name: str) -> tuple[str, int] | None:
    """Return the side and number that ``neighbour_name`` has joined; None for any other text."""
    return _PLACES.get(name)


# Looked up instead of parsed: other machines send these names, and int() fails on long ones.
_PLACES = {
    neighbour_name(side, place): (side, place)
    for side in (BEFORE, SHARE, BEHIND)
    for place in range(_MOST_SHARES)
}


def secret_for(session: str, name: str) -> str:
    """Return the secret that opens a segment's stream from one neighbour only."""
    return hashlib.sha256(f"{name} {session}".encode()).hexdigest()
