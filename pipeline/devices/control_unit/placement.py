"""Place a plan's segments on devices: load, connect, command and monitor them."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise

from torch import Tensor

from collapipe.errors import BusyLinkError, NonFiniteLossError, StageError, WireError, one_line
from collapipe.models.split import block_name
from collapipe.plan import ClusterPlan, SegmentPlan, connected
from collapipe.process import cancellation
from collapipe.process.host import Host
from collapipe.wire.channels import without_addresses
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream
from pipeline import schedule
from pipeline.devices.control_unit.action_times import Clock
from pipeline.devices.control_unit.connection import SILENT_S, Cluster, DeviceConnection
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.hops import HopError, Side, UndialledError, check_read, relay
from pipeline.devices.messages import (
    BEFORE,
    BEHIND,
    MOST_JSON_BYTES,
    SHARE,
    PartHeader,
    Peer,
    RoundDescription,
    SegmentDescription,
    Trouble,
    Wanted,
    neighbour_name,
    packed,
    place_of,
    secret_for,
    unpacked,
)
from pipeline.schedule import BACKWARD, Action

_CLOCK_TRIPS = 3
_BUSY_S = 0.2  # pause between attempts to dial a busy device
_WARN_AFTER_S = 2.0  # after which the user is told that a device is busy
_LOOK_S = 0.1  # pause between checks of cancellation and signs of life
_STALLED_S = 60.0  # beyond ``hung_s``, without anything under way, after which a device is lost
_STOPPED_S = 1.0  # if checks are further apart, this process was paused
_log = logging.getLogger(__name__)


class UnreachedError(StageError):
    """The neighbour ``source`` cannot dial a device, although both are alive."""

    def __init__(self, device: str, cause: str, source: str) -> None:
        super().__init__(device, cause)
        self.source = source


class BusyDeviceError(BusyLinkError):
    """A device served another caller for longer than the cluster's ``busy_s``."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(cause)
        self.device = device


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two devices that exchange tensors, and their names as each other's neighbours; the first one
    dials."""

    first: str
    name_of_second: str
    second: str
    name_of_first: str


@dataclass
class Placement:
    """The devices that hold a plan's segments, in their order.

    ``common`` is the part of the round's description that all segments share. ``connections``
    includes devices that the plan does not use. ``arrived`` is set when a device sends a frame.

    Methods that wait raise ``StageError`` if a device of the plan is lost, ``NonFiniteLossError``
    if a device has values that are not finite, and ``CancelledRoundError``.
    """

    plan: ClusterPlan
    cluster: Cluster
    common: RoundDescription
    replica: Replica
    connections: dict[str, DeviceConnection] = field(default_factory=dict)
    arrived: threading.Event = field(default_factory=threading.Event)
    clocks: dict[str, Clock] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    hops: list[FrameStream] = field(default_factory=list)
    """The control unit's streams to the devices' inputs and outputs."""

    def __post_init__(self) -> None:
        self.front, self.back = Side({}), Side({})
        """Streams to the first segment's input and the last one's output."""
        self.hung_s = self.cluster.hung_s(self.plan)
        self._state_parts = list[tuple[DeviceConnection, Callable[[], Frame]]]()  # sent later
        self._checked_s, self.awake_s = time.monotonic(), 0.0
        self._moved_s = self._checked_s
        self.under_way: tuple[int, schedule.Schedule] = 0, ()  # a step, and its segments' actions
        self._unanswered: Sequence[str] = ()  # devices whose answer is awaited

    @property
    def names(self) -> list[str]:
        return [name for segment in self.plan.segments for name in segment.devices]

    @property
    def members(self) -> list[DeviceConnection]:
        return [self.connections[name] for name in self.names]

    def followed_by(self, plan: ClusterPlan, cluster: Cluster) -> "Placement":
        """Return a placement of another plan with the same connections, in the next epoch."""
        self.close_hops()
        for connection in self.connections.values():
            connection.control.drop_parts()
        common = replace(self.common, epoch=self.common.epoch + 1)
        shared = self.connections, self.arrived, self.clocks, self.hosts
        return Placement(plan, cluster, common, self.replica, *shared)

    def gather(self) -> None:
        """Load each device's segment, and connect the devices in their order.

        A device may still be busy for another caller, such as a cancelled round; the wait for it
        is limited by the cluster's ``busy_s``.
        """
        busy_s = self.cluster.busy_s
        until = time.monotonic() + (self.hung_s if busy_s is None else busy_s)
        epoch, segments = self.common.epoch, self.plan.segments
        held = {
            block_name(k): leader
            for each in segments
            for k, leader in zip(each.span.indices(), each.leaders, strict=True)
        }
        self.replica.expect(epoch, held)
        self._dial([name for name in self.names if name not in self.connections], until)
        sessions = {name: secrets.token_hex(16) for name in self.names}
        for name in self.names:
            description = packed(self._description(name, sessions))
            self.connections[name].control.send(self.frame(FrameKind.LOAD, 0, description))
        answers = self.all_answer(FrameKind.WANTED)
        self.send_to_all(FrameKind.OPEN)
        for connection, answer in zip(self.members, answers, strict=True):
            wanted = _wanted(connection, answer)
            self.hosts[connection.name] = wanted.host
            for name in map(block_name, self._segment(connection.name).span.indices()):
                leads = held[name] == connection.name  # others need no optimiser state
                if name in wanted.blocks:
                    parts = self._parts(name, name in wanted.frozen, leads)
                else:
                    parts = self._state_of(name) if name in wanted.states else iter(())
                for state, make in parts:
                    if state:
                        self._state_parts.append((connection, make))
                    else:
                        connection.control.send_later(make)
        self._connect(sessions)
        self.all_answer(FrameKind.READY)

    def is_built(self, segment: SegmentPlan) -> bool:
        """Whether all devices of a segment have its weights."""
        own = (self.connections[name] for name in segment.devices)
        return all(each.built == self.common.epoch for each in own)

    def set_clocks(self) -> None:
        """Measure the clocks of devices that lack one at once, by a few round trips; the quickest
        has the least error. Raises ``StageError`` if a device is lost."""
        members = [each for each in self.members if each.name not in self.clocks]
        found = dict[str, Clock]()
        for _ in range(_CLOCK_TRIPS if members else 0):
            requested_s = {}
            for each in members:
                requested_s[each.name] = time.monotonic()
                each.control.send(self.frame(FrameKind.CLOCK))
            frames = self._answers(FrameKind.CLOCK, 0, members)
            for each, frame in zip(members, frames, strict=True):
                error_s = (each.answered_s - requested_s[each.name]) / 2
                if error_s < 0:
                    raise StageError(each.name, "sent the time before it was asked")
                clock = Clock(each.answered_s - error_s - float(frame.tensors[0]), error_s)
                known = found.setdefault(each.name, clock)
                found[each.name] = min(known, clock, key=lambda one: one.error_s)
        self.clocks.update(found)

    @property
    def known_clocks(self) -> Mapping[str, Clock] | None:
        """The clocks of the plan's devices; None unless all were measured."""
        return self.clocks if self.clocks.keys() >= {*self.names} else None

    def check_hops(self) -> None:
        """Raise ``HopError`` if a device has not read its tensors of the last step."""
        for side, place in (self.front, BEHIND), (self.back, BEFORE):
            check_read({neighbour_name(place, k): each for k, each in side.streams.items()})

    def close_hops(self) -> None:
        """End the streams between stages."""
        while self.hops:
            self.hops.pop().close()

    def drop(self, device: str) -> None:
        """End all streams of a device."""
        if connection := self.connections.pop(device, None):
            connection.drop()

    def frame(self, kind: FrameKind, step: int = 0, *tensors: Tensor) -> Frame:
        """Make a frame of this round and epoch."""
        return Frame(kind, self.common.round, step, 0, tensors, self.common.epoch)

    def send_to_all(self, kind: FrameKind, step: int = 0, *tensors: Tensor) -> None:
        """Send a command to each device."""
        for connection in self.members:
            connection.control.send(self.frame(kind, step, *tensors))

    def all_answer(self, kind: FrameKind, step: int = 0) -> list[Frame]:
        """Wait for each device's answer to a command. Returns them in order."""
        return self._answers(kind, step, self.members)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Block until the condition is true."""
        while not condition():
            self.idle()
        self._look_for_trouble()  # a device may have reported it before the condition was true

    def idle(self) -> None:
        """Wait a short time for a frame, then check cancellation and the devices."""
        self.arrived.wait(_LOOK_S)
        self.arrived.clear()
        cancellation.check()
        self._notice_pause()
        for connection in self.members:
            connection.check(self.hung_s)
        self._look_for_trouble()
        self._look_for_stall()
        # state would delay the first activation
        if any(each.bytes_in for each in self.back.streams.values()):
            while self._state_parts:
                connection, make = self._state_parts.pop(0)
                connection.control.send_later(make)

    def _notice_pause(self) -> None:
        """Add the time since the last check to ``awake_s``, unless this process was paused: then no
        device was silent."""
        now = time.monotonic()
        passed, self._checked_s = now - self._checked_s, now
        if passed <= _STOPPED_S:
            self.awake_s += passed
            return
        self._moved_s = now
        for connection in self.connections.values():
            connection.control.last_received_s = now

    def reset_stall_timer(self) -> None:
        """Call while devices wait for another machine, or for this process."""
        self._moved_s = time.monotonic()

    def _look_for_stall(self) -> None:
        """Raise ``StageError`` if all devices wait, though nothing is under way between any two.

        Devices report when they last computed, sent or received anything.
        """
        devices = (each.moved_s for each in self.members)
        moved_s = max(self._moved_s, *devices, *(each.last_moved_s for each in self.hops))
        stalled_s = self._checked_s - moved_s
        if stalled_s > self.hung_s + _STALLED_S:
            raise StageError(self._awaited_device(), f"has not answered for {stalled_s:.0f} s")

    def _awaited_device(self) -> str:
        """The device for which the others wait: the first one that has the input of its next
        action, or else one of those that have not answered that has done least."""
        step, lists = self.under_way
        current = self.common.round, self.common.epoch, step
        counts, done = dict[str, int](), list[set[Action]]()
        for segment, actions in zip(self.plan.segments, lists, strict=False):
            for name in segment.devices:
                at, finished = self.connections[name].progress
                counts[name] = finished if (at.round, at.epoch, at.step) == current else 0
            done.append({*actions[: min(counts[name] for name in segment.devices)]})
        if done:  # the head has answered what it received
            done.append({Action(BACKWARD, each.micro_batch) for each in done[-1]})
        for stage, actions in enumerate(lists):
            for name in self.plan.segments[stage].devices:
                left = actions[counts[name] :]
                if left and schedule.ready(left[0], stage, done):
                    return name
        if self._unanswered:
            return min(self._unanswered, key=lambda name: counts.get(name, 0))
        return self.replica.waits_for()

    def _look_for_trouble(self) -> None:
        for connection in self.members:
            if trouble := connection.troubles.get(self.common.epoch):
                if trouble.kind == NonFiniteLossError.__name__:  # not the device's fault
                    devices = self.cluster.devices.values()
                    raise NonFiniteLossError(without_addresses(trouble.message, devices))
                raise StageError(connection.name, f"{trouble.kind}: {trouble.message}")

    def blamed(self, error: StageError | HopError) -> StageError:
        """Choose the device to drop: an unreachable one, else the neighbour named in the error.

        If no neighbour is named, this is the device that reported the error.
        """
        suspect = self._suspect(error)
        deadline = time.monotonic() + SILENT_S
        while time.monotonic() < deadline and suspect is not None:
            self._notice_pause()
            for name in self.names:
                try:
                    if connection := self.connections.get(name):
                        connection.check(self.hung_s)
                except StageError as gone:
                    return gone
            self.arrived.wait(_LOOK_S)
            self.arrived.clear()
        if suspect is None:
            assert isinstance(error, StageError)
            return error
        if isinstance(error, StageError):
            trouble = self.trouble(error.device)
            if trouble is not None and trouble.kind == UndialledError.__name__:
                return UnreachedError(suspect, trouble.message, error.device)
        return StageError(suspect, str(error))

    def trouble(self, device: str) -> Trouble | None:
        """The error that the device has reported under this plan, or None."""
        connection = self.connections.get(device)
        return connection.troubles.get(self.common.epoch) if connection else None

    def _dial(self, names: Sequence[str], until: float) -> None:
        """Dial devices at once; retry busy ones until the time ``until`` of ``time.monotonic``.

        Raises ``BusyDeviceError`` after that, if the cluster has a ``busy_s``.
        """
        silent_until, warned = time.monotonic() + _WARN_AFTER_S, set[str]()
        while names:
            with ThreadPoolExecutor(len(names)) as pool:
                tried = zip(names, pool.map(self._try_to_dial, names), strict=True)
            refused = {name: why for name, why in tried if why is not None}
            for name, why in refused.items():
                if not isinstance(busy := why.__cause__, BusyLinkError):
                    raise why
                if time.monotonic() > until:
                    if self.cluster.busy_s is None:
                        raise why
                    raise BusyDeviceError(name, str(busy)) from why
                if time.monotonic() > silent_until and name not in warned:
                    warned.add(name)
                    _log.warning("waiting for %s: %s", name, one_line(busy))
            if names := list(refused):
                time.sleep(_BUSY_S)
                cancellation.check()

    def _try_to_dial(self, name: str) -> StageError | None:
        """Dial a device once. Returns why it is not connected, or None."""
        if name not in self.cluster.devices:
            return StageError(name, "the cluster's file has no such device")
        how = self.cluster.channels, self.arrived, self.replica.put, self.replica.most_bytes()
        try:
            self.connections[name] = DeviceConnection(self.cluster.devices[name], *how)
        except StageError as refused:
            return refused
        return None

    def _segment(self, name: str) -> SegmentPlan:
        """The segment that the device holds."""
        return next(each for each in self.plan.segments if name in each.devices)

    def _pairs(self) -> Iterator[_Pair]:
        """Yield each two devices that exchange tensors."""
        segments = self.plan.segments
        for segment in segments:
            for (a, first), (b, second) in combinations(enumerate(segment.devices), 2):
                yield _Pair(first, neighbour_name(SHARE, b), second, neighbour_name(SHARE, a))
        for before, after in pairwise(segments):
            for a, b in connected(before.parts, after.parts):
                ends = before.devices[a], after.devices[b]
                yield _Pair(ends[0], neighbour_name(BEHIND, b), ends[1], neighbour_name(BEFORE, a))

    def _dialled_by(self, name: str) -> list[_Pair]:
        """The pairs of which the device dials the second one: none if hops are relayed."""
        return [] if self.cluster.relay else [each for each in self._pairs() if each.first == name]

    def _description(self, name: str, sessions: Mapping[str, str]) -> SegmentDescription:
        segment = self._segment(name)
        stage = self.plan.segments.index(segment)
        held = set(map(block_name, segment.span.indices()))
        own = segment.shares_of(name)
        around = [None, *self.plan.segments, None][stage : stage + 3 : 2]
        rows_before, rows_behind = (each.parts if each else (1,) for each in around)
        part = sum(segment.rows[own.start : own.stop]) / sum(segment.rows)
        m = self.plan.num_micro_batches
        kept = schedule.kept(self.plan.schedule, len(self.plan.segments), m)
        recompute = self.common.recompute or name in segment.recomputing
        return SegmentDescription(
            **replace(self.common, recompute=recompute).for_blocks(held),
            session=sessions[name],
            memory_bytes=self.cluster.needed_bytes(
                segment.span.blocks,
                kept[stage] / m,
                part,
                segment.extra_gradients(name),
                recompute,
            ),
            span=segment.span,
            stage=stage,
            num_segments=len(self.plan.segments),
            num_micro_batches=m,
            schedule=self.plan.schedule,
            base=-1 if self.replica.step is None else self.replica.step,
            shares=segment.rows,
            cuts=tuple(segment.shares_of(each).stop for each in segment.devices),
            member=segment.devices.index(name),
            rows_before=rows_before,
            rows_behind=rows_behind,
            peers=tuple(
                Peer(
                    address=self.cluster.devices[pair.second],
                    neighbour=pair.name_of_second,
                    secret=secret_for(sessions[pair.second], pair.name_of_first),
                )
                for pair in self._dialled_by(name)
            ),
        )

    def _parts(
        self, name: str, frozen: bool, state: bool
    ) -> Iterator[tuple[bool, Callable[[], Frame]]]:
        """Yield a block's parts, each read from the replica when it is sent, and whether it is
        optimiser state, which is left out without ``state``."""
        found = self.replica.parts(name, frozen or name not in self.common.frozen)
        groups = [keys for keys in found if state or not _of_state(keys)]
        for keys, make in zip(groups, self._frames(name, groups), strict=True):
            yield _of_state(keys), make

    def _state_of(self, name: str) -> Iterator[tuple[bool, Callable[[], Frame]]]:
        """Yield the parts of a block's optimiser state: an empty one if there is none yet."""
        parts = self.replica.parts(name, whole=False)
        groups: list[Sequence[str]] = [keys for keys in parts if _of_state(keys)]
        for make in self._frames(name, groups or [()]):
            yield True, make

    def _frames(self, name: str, groups: Sequence[Sequence[str]]) -> Sequence[Callable[[], Frame]]:
        def part(left: int, keys: Sequence[str]) -> Frame:
            header = packed(PartHeader(name, left))
            return self.frame(FrameKind.PART, 0, header, self.replica.packed(name, keys))

        return [partial(part, left, keys) for left, keys in enumerate(reversed(groups))][::-1]

    def _connect(self, sessions: Mapping[str, str]) -> None:
        """Open the control unit's streams to the first segment's input and the last segment's
        output, and those between devices whose tensors pass the control unit."""

        def opened(device: str, name: str) -> FrameStream:
            self.hops.append(self.connections[device].hop(sessions[device], name))
            return self.hops[-1]

        def side(segment: SegmentPlan, place: str) -> Side:
            name = neighbour_name(place, 0)
            streams = [opened(device, name) for device in segment.devices]
            return Side(dict(enumerate(streams)), segment.device_rows)

        segments = self.plan.segments
        self.front, self.back = side(segments[0], BEFORE), side(segments[-1], BEHIND)
        for pair in self._pairs() if self.cluster.relay else ():
            ends = opened(pair.first, pair.name_of_second), opened(pair.second, pair.name_of_first)
            for stream in ends:
                stream.max_bytes = self.replica.most_bytes() + MOST_JSON_BYTES
            relay(*ends)

    def _answers(
        self, kind: FrameKind, step: int, members: Sequence[DeviceConnection]
    ) -> list[Frame]:
        frames: dict[str, Frame] = {}

        def complete() -> bool:
            for each in members:
                if each.name not in frames and (frame := each.answer(self.frame(kind, step))):
                    frames[each.name] = frame
            self._unanswered = [each.name for each in members if each.name not in frames]
            return not self._unanswered

        self.wait(complete)
        return [frames[each.name] for each in members]

    def _suspect(self, error: StageError | HopError) -> str | None:
        """The neighbour that an error names; None if the device itself failed."""
        segments = self.plan.segments
        if isinstance(error, HopError):  # of the control unit, which is at both ends
            name = error.neighbour
            own = len(segments) if name.startswith(BEFORE) else -1
        else:
            trouble = self.trouble(error.device)
            if trouble is None or trouble.neighbour is None or error.device not in self.names:
                return None
            dialled = {pair.name_of_second for pair in self._dialled_by(error.device)}
            if trouble.kind == UndialledError.__name__ and trouble.neighbour not in dialled:
                return None  # else each such report would repeat the recovery without a loss
            name, own = trouble.neighbour, segments.index(self._segment(error.device))
        if (at := place_of(name)) is None:
            return None
        stage = own + {BEFORE: -1, SHARE: 0, BEHIND: 1}[at[0]]
        devices = segments[stage].devices if 0 <= stage < len(segments) else ()
        return devices[at[1]] if at[1] < len(devices) else None


def _of_state(keys: Sequence[str]) -> bool:
    """Whether these tensors of a block are optimiser state."""
    return any("/" in key for key in keys)


def _wanted(connection: DeviceConnection, answer: Frame) -> Wanted:
    """Return the blocks that the device lacks. Raises ``StageError`` for an invalid answer."""
    try:
        return unpacked(Wanted, *answer.tensors[:1])
    except (WireError, TypeError) as error:
        raise StageError(connection.name, f"answered {answer.kind.name} with {error}") from error
