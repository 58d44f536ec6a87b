"""The devices that hold a plan's segments: command, monitor and drop them."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from collapipe.errors import NonFiniteLossError, StageError
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.process import cancellation
from collapipe.process.host import Host
from collapipe.wire.device_address import without_places
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline import schedule
from pipeline.devices.control_unit.blame import UnreachedError, holds_up, suspect
from pipeline.devices.control_unit.connection import SILENT_S, Cluster, DeviceConnection
from pipeline.devices.control_unit.measurements import Clock
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.control_unit.watch import Watch
from pipeline.devices.hops import HopError, Side, UndialledError, check_read
from pipeline.devices.messages import BEFORE, BEHIND, RoundDescription, Trouble, neighbour_name

_CLOCK_TRIPS = 3
_LOOK_S = 0.1  # pause between checks of cancellation and signs of life
_STALLED_S = 60.0  # beyond ``hung_s``, without anything under way, after which a device is lost


@dataclass
class Placement:
    """The devices that hold a plan's segments, in their order.

    ``common`` is the part of the round's description that all segments share. ``connections``
    includes devices that the plan does not use. ``arrived`` is set when a device sends a frame.

    Methods that wait raise ``StageError`` if a device of the plan is lost, ``NonFiniteLossError``
    if a device has values that are not finite, ``StorageError`` if this machine cannot store or
    read the devices' blocks, and ``CancelledRoundError``.
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
        self.state_parts = list[tuple[FrameStream, Callable[[], Frame]]]()  # sent later
        self.watch = Watch()
        self.under_way: tuple[int, schedule.Schedule] = 0, ()  # a step, and its segments' actions
        self._unanswered: Sequence[str] = ()  # devices whose answer is awaited

    @property
    def members(self) -> list[DeviceConnection]:
        return [self.connections[name] for name in self.plan.devices]

    def followed_by(self, plan: ClusterPlan, cluster: Cluster) -> "Placement":
        """Return a placement of another plan with the same connections, in the next epoch."""
        self.close_hops()
        for connection in self.connections.values():
            connection.control.drop_parts()
        common = replace(self.common, epoch=self.common.epoch + 1)
        shared = self.connections, self.arrived, self.clocks, self.hosts
        return Placement(plan, cluster, common, self.replica, *shared)

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
        return self.clocks if self.clocks.keys() >= {*self.plan.devices} else None

    def check_hops(self) -> None:
        """Raise ``HopError`` if a device has not read its tensors of the last step."""
        for side, place in (self.front, BEHIND), (self.back, BEFORE):
            check_read({neighbour_name(place, k): each for k, each in side.streams.items()})

    def close_hops(self) -> None:
        """End the streams between stages."""
        while self.hops:
            self.hops.pop().close()

    def release(self, device: str) -> None:
        """End the connection to a device, if there is one; it may be dialled again."""
        if connection := self.connections.pop(device, None):
            connection.close()

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
        if self.replica.unreadable is not None:  # its reader's stream ends: no device is lost
            raise self.replica.unreadable
        for connection in self.members:
            connection.check(self.hung_s)
        self._look_for_trouble()
        self._look_for_stall()
        # state would delay the first activation
        if any(each.bytes_in for each in self.back.streams.values()):
            while self.state_parts:
                control, make = self.state_parts.pop(0)
                control.send_later(make)

    def _notice_pause(self) -> None:
        """Reset the devices' silence if this process was paused."""
        if self.watch.was_paused():
            for connection in self.connections.values():
                connection.control.last_received_s = self.watch.checked_s

    def _look_for_stall(self) -> None:
        """Raise ``StageError`` if all devices wait, though nothing is under way between any two.

        Devices report when they last computed, sent or received anything.
        """
        moved_s = [each.moved_s for each in self.members]
        stalled_s = self.watch.still_s(moved_s + [each.last_moved_s for each in self.hops])
        if stalled_s > self.hung_s + _STALLED_S:
            raise StageError(self._awaited_device(), f"has not answered for {stalled_s:.0f} s")

    def _awaited_device(self) -> str:
        """The device for which the others wait: the first one that has the input of its next
        action, or else one of those that have not answered that has done least."""
        step, lists = self.under_way
        current, finished = (self.common.round, self.common.epoch, step), dict[str, int]()
        for each in self.members if lists else ():
            at, count = each.progress
            finished[each.name] = count if (at.round, at.epoch, at.step) == current else 0
        if lists and (name := holds_up(self.plan, lists, finished)):
            return name
        if self._unanswered:
            return min(self._unanswered, key=lambda name: finished.get(name, 0))
        return self.replica.waits_for()

    def _look_for_trouble(self) -> None:
        for connection in self.members:
            if trouble := connection.troubles.get(self.common.epoch):
                if trouble.kind == NonFiniteLossError.__name__:  # not the device's fault
                    devices = self.cluster.devices.values()
                    raise NonFiniteLossError(without_places(trouble.message, devices))
                raise StageError(connection.name, f"{trouble.kind}: {trouble.message}")

    def blamed(self, error: StageError | HopError) -> StageError:
        """Choose the device to drop: an unreachable one, else the neighbour named in the error.

        If no neighbour is named, this is the device that reported the error.
        """
        trouble = self.trouble(error.device) if isinstance(error, StageError) else None
        suspected = suspect(error, trouble, self.plan, self.cluster.relay)
        if suspected is None:
            assert isinstance(error, StageError)
            return error
        deadline = time.monotonic() + SILENT_S
        while time.monotonic() < deadline:
            self._notice_pause()
            for name in self.plan.devices:
                try:
                    if connection := self.connections.get(name):
                        connection.check(self.hung_s)
                except StageError as gone:
                    return gone
            self.arrived.wait(_LOOK_S)
            self.arrived.clear()
        if isinstance(error, StageError) and trouble and trouble.kind == UndialledError.__name__:
            return UnreachedError(suspected, trouble.message, error.device)
        return StageError(suspected, str(error))

    def trouble(self, device: str) -> Trouble | None:
        """The error that the device has reported under this plan, or None."""
        connection = self.connections.get(device)
        return connection.troubles.get(self.common.epoch) if connection else None

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
