"""Frozen plans: the scheduler's decisions, which training executes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations, groupby
from typing import Annotated

from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.row_shares import common_rows, leaders
from collapipe.state import DeviceProfile, HeadPlace, Precision

# checked when they are read from a file or a message
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[Finite, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive encoder blocks, ``first`` … ``first + blocks - 1`` (δ_k blocks)."""

    first: int
    blocks: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.blocks < 1:
            raise ConfigError(
                f"a span of {self.blocks} blocks from block {self.first} is impossible; "
                "a segment holds at least one block"
            )

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.first + self.blocks

    def indices(self) -> range:
        """Return the blocks' indices in the whole encoder."""
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class Share:
    """A device's rows y_k of the largest micro-batch, in a segment that several devices hold."""

    device: str
    rows: int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment s of the encoder and the device that holds it.

    With ``shares`` several devices hold all its blocks, each for its rows of a micro-batch, in this
    order; the first one is ``device``. After a loss a device may have several shares, which are
    then next to each other. Devices that are ``recomputing`` keep only the segment's inputs.
    """

    device: str
    span: Span
    shares: tuple[Share, ...] = ()
    recomputing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not {*self.recomputing} <= {*self.devices}:
            raise ConfigError(f"segment on {self.device}: lacks {self.recomputing}; drop these")
        if not self.shares:
            return
        names = [name for name, _ in groupby(share.device for share in self.shares)]
        if (
            names[0] != self.device
            or len({*names}) < len(names)
            or len(self.shares) < 2
            or min(share.rows for share in self.shares) < 1
        ):
            raise ConfigError(
                f"segment on {self.device}: shares {self.holders}; expected two or more, first of "
                f"{self.device}, each device's without others between, each of at least one row"
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices that hold the segment, each once."""
        return tuple(dict.fromkeys(share.device for share in self.shares)) or (self.device,)

    @property
    def leaders(self) -> tuple[str, ...]:
        """The device that steps each of the segment's blocks."""
        numbers = leaders(self.parts, self.span.blocks)
        return tuple(self.devices[number] for number in numbers)

    @property
    def rows(self) -> tuple[int, ...]:
        """The planned rows of each share; one share has all rows."""
        return tuple(share.rows for share in self.shares) or (1,)

    @property
    def rows_of_devices(self) -> tuple[int, ...]:
        """The planned rows of each device; empty for a device alone."""
        owns = map(self.shares_of, self.devices) if self.shares else ()
        return tuple(sum(self.rows[own.start : own.stop]) for own in owns)

    @property
    def parts(self) -> tuple[int, ...]:
        """The devices' parts of the rows; a device alone has one of one."""
        return self.rows_of_devices or (1,)

    def shares_of(self, device: str) -> range:
        """Return the numbers of the device's shares."""
        held = [place for place, share in enumerate(self.shares) if share.device == device]
        return range(held[0], held[-1] + 1) if held else range(1)

    def extra_gradients(self, device: str) -> int:
        """Return how many blocks' gradients the device keeps beyond one set: those of its further
        shares, and for blocks that it leads those of all other shares."""
        own, led = len(self.shares_of(device)), self.leaders.count(device)
        return (own - 1) * self.span.blocks + (len(self.rows) - own) * led

    def device_rows(self, rows: int) -> list[tuple[int, int]]:
        """Return the range of rows of each device, of a micro-batch of ``rows`` rows."""
        return common_rows((1,), 0, self.parts, rows)

    def without(self, missing: Collection[str]) -> "SegmentPlan | None":
        """Return the segment with the shares of devices that are ``missing`` on the nearest device
        before them, or else behind them; None if all of the segment's devices are. If one of them
        recomputes, all do then: they keep less for each row, and bits are the same."""
        left = [name for name in self.devices if name not in missing]
        if not left or left == [*self.devices]:
            return self if left else None
        shares, heir = list[Share](), left[0]
        for share in self.shares:
            heir = heir if share.device in missing else share.device
            shares.append(replace(share, device=heir))
        recomputing = tuple(left) if self.recomputing else ()
        return replace(self, device=left[0], shares=tuple(shares), recomputing=recomputing)

    def on(self, device: str) -> "SegmentPlan":
        """Return the segment with all its shares on one device."""
        return self.renamed(dict.fromkeys(self.devices, device))

    def renamed(self, names: Mapping[str, str]) -> "SegmentPlan":
        """Return the segment on other devices, by the names of its own ones."""
        shares = tuple(replace(share, device=names[share.device]) for share in self.shares)
        recomputing = tuple(dict.fromkeys(names[name] for name in self.recomputing))
        return replace(self, device=names[self.device], shares=shares, recomputing=recomputing)

    def with_blocks_of(self, other: "SegmentPlan") -> "SegmentPlan":
        """Return the segment of one device with the blocks of a neighbouring one."""
        first = min(self.span.first, other.span.first)
        recomputing = (self.device,) if self.recomputing or other.recomputing else ()
        span = Span(first, self.span.blocks + other.span.blocks)
        return replace(self, span=span, recomputing=recomputing)

    @property
    def holders(self) -> str:
        """The devices for messages, with the rows of each if they share the segment."""
        shares = ", ".join(f"{share.rows} {share.device}" for share in self.shares)
        return f"({shares})" if shares else self.device


def _with_heir(
    segments: tuple[SegmentPlan, ...], lost: Collection[int], spare: Sequence[str]
) -> Iterator[tuple[SegmentPlan, ...]]:
    """Yield the segments with the first ``lost`` one on each device that can take it over; nothing
    if there are too few devices for all lost ones."""
    place, needed = min(lost), 0
    for shared, row in groupby(enumerate(segments), key=lambda pair: bool(pair[1].shares)):
        of_row = [k in lost for k, _ in row]
        needed += sum(of_row) if shared else all(of_row)  # a neighbour can take over
    kept = {k: each for k, each in enumerate(segments) if each.shares and k not in lost}
    if needed > len(spare) + sum(len(each.devices) - 1 for each in kept.values()):
        return
    own = segments[place]
    changes = [{place: own.on(name)} for name in spare]
    for k, each in kept.items():
        fewer = ((name, each.without({name})) for name in each.devices)
        changes += ({place: own.on(name), k: rest} for name, rest in fewer if rest)
    for change in changes:
        yield tuple(change.get(k, each) for k, each in enumerate(segments))
    # a later neighbour takes over all lost ones before it
    later = next((k for k in range(place, len(segments)) if k not in lost), -1)
    for heir, taken in ((place - 1, segments[place : place + 1]), (later, segments[place:later])):
        if heir >= 0 and not any(each.shares for each in (segments[heir], *taken)):
            joined = reduce(SegmentPlan.with_blocks_of, reversed(taken), segments[heir])
            yield *segments[: min(heir, place)], joined, *segments[max(heir, place) + 1 :]


def segment_plans(devices: Sequence[DeviceProfile], held: Sequence[int]) -> tuple[SegmentPlan, ...]:
    """Return the segments of ``held`` blocks per device, contiguous in the devices' order."""
    segments, first = [], 0
    for device, blocks in zip(devices, held, strict=True):
        if blocks:
            segments.append(SegmentPlan(device.name, Span(first, blocks)))
            first += blocks
    return tuple(segments)


Witness = tuple[tuple[Finite, ...], ...]
"""For each m, ascending, the thresholds that divide the time of the slowest stage into ranges, s;
see ``optim.verify.witness``."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A solver's proof for its answer: no solution of its problem is below ``lower_bound``.

    A heuristic without a bound gives 0. Comparisons of certificates ignore the solve time. From the
    ``witness``, if there is one, the bound follows without a search (``optim.verify.witness``).
    """

    objective: Finite
    lower_bound: Finite
    solver: str
    solve_time_s: Amount = field(compare=False)
    witness: Witness = field(default=(), compare=False)

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / |objective|; 0 if they are equal."""
        excess = self.objective - self.lower_bound
        return excess / abs(self.objective) if excess else 0.0


@dataclass(frozen=True, slots=True)
class UplinkPlan:
    """Channel j, transmit power p_n and upload time of a unit.

    ``finish_s`` is the unit's total time; it is shorter than ``latency_s`` plus ``upload_s`` if the
    upload overlaps with the pipeline. ``activation`` and ``upload`` are precisions, ``head`` is the
    place of the head; each is None if the configuration fixes it.
    """

    channel: int
    power_w: Amount
    upload_s: Amount
    finish_s: Amount
    activation: Precision | None = None
    upload: Precision | None = None
    head: HeadPlace | None = None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plan of one cluster for one round.

    ``segments`` are the S segments in pipeline order, contiguous from block 0. Without segments
    every device trains all blocks on its share of the batch. A batch with fewer samples than
    ``num_micro_batches`` (m) is split into single samples. ``schedule`` is a value of
    ``pipeline.schedule``. ``latency_s`` is the modelled time of the round's pipelines, None if the
    strategy does not model time. ``uplink`` is None if the strategy plans no channels.
    ``over_limits`` means that a device may get more than its memory or energy allows.
    """

    unit: int
    segments: tuple[SegmentPlan, ...]
    num_micro_batches: int
    schedule: str
    latency_s: Amount | None = None
    uplink: UplinkPlan | None = None
    over_limits: bool = False

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ConfigError(
                f"unit {self.unit}: {self.num_micro_batches} micro-batches; at least 1"
            )
        expected = 0
        for segment in self.segments:
            if segment.span.first != expected:
                raise ConfigError(
                    f"unit {self.unit}: segment on {segment.device} starts at block "
                    f"{segment.span.first}, expected {expected}; segments follow each other"
                )
            expected = segment.span.stop

    def in_modes(self, devices: Mapping[str, DeviceProfile]) -> dict[str, DeviceProfile]:
        """Return the ``devices`` by name, each as it computes in this plan."""
        recomputing = {name for each in self.segments for name in each.recomputing}
        return {name: each.in_mode(name in recomputing) for name, each in devices.items()}

    @property
    def shares(self) -> bool:
        """Whether several devices hold a segment, or did before a loss."""
        return any(segment.shares for segment in self.segments)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices that hold a segment."""
        return tuple(name for segment in self.segments for name in segment.devices)

    @property
    def order_of_sums(self) -> tuple[int, tuple[tuple[Span, tuple[int, ...]], ...]]:
        """The micro-batches, and each shared segment's blocks with its shares' rows. Plans that
        are equal in this give equal weights."""
        return self.num_micro_batches, tuple((e.span, e.rows) for e in self.segments if e.shares)

    def swapping(self, spare: Sequence[str]) -> Iterator["ClusterPlan"]:
        """Yield the plans in which two devices, of which one may be ``spare``, are exchanged. This
        changes no bit."""
        used = self.devices
        for a, b in combinations([*used, *self.unused(spare)], 2):
            if a in used:
                names = dict(zip(used, used, strict=True)) | {a: b, b: a}
                yield replace(self, segments=tuple(e.renamed(names) for e in self.segments))

    def without(
        self, missing: Collection[str], spare: Sequence[str] = ()
    ) -> Iterator["ClusterPlan"]:
        """Yield the plans in which others compute the shares of devices that are ``missing``, which
        changes no bit; none if no other device can. After several losses there may be many.

        Shares go to the other devices of their segment. A segment without others goes to a
        ``spare`` device, to one of several devices of another segment, or, if neither has shares,
        to the device of a neighbouring segment.
        """
        waiting = [tuple(each.without(missing) or each for each in self.segments)]
        while waiting:
            plan = replace(self, segments=waiting.pop())
            if lost := [k for k, each in enumerate(plan.segments) if each.device in missing]:
                waiting += reversed([*_with_heir(plan.segments, lost, plan.unused(spare))])
            else:
                yield plan

    def unused(self, names: Sequence[str]) -> list[str]:
        """Return those of the devices that hold no segment."""
        return [name for name in names if name not in self.devices]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of round t: a plan for every scheduled unit, in the units' order.

    ``gammas`` are Γ_n(t) of all N units (eq. 28), ``queues`` are Y_n(t+1) after this round
    (eq. 29), and ``idle_queues`` are their values for units that were scheduled but failed. All
    three are empty if the strategy keeps no queues. ``error_queues`` are Q_n(t+1), which count the
    rounding error of gradients; empty if none are kept. ``certificate`` is None if the strategy
    solves no optimisation problem.
    """

    round: int
    clusters: tuple[ClusterPlan, ...]
    gammas: tuple[Finite, ...] = ()
    queues: tuple[Amount, ...] = ()
    idle_queues: tuple[Amount, ...] = ()
    certificate: Certificate | None = None
    error_queues: tuple[Amount, ...] = ()
