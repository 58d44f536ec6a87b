"""A control unit's session on this device: it loads segments one after another and runs steps."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from collapipe.errors import BusyLinkError, LinkError, RefusedLinkError, WireError, one_line
from collapipe.process.torch_device import keep_to_threads
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline import schedule
from pipeline.devices.daemon.activity import Activity, peak_bytes
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.share import Exchange, Header, Packed
from pipeline.devices.encoding import MOST_JSON_BYTES, as_bytes, numbers, packed, shapes, unpacked
from pipeline.devices.fence import Fence
from pipeline.devices.hops import (
    HopError,
    Side,
    StreamPorts,
    TimedPorts,
    UndialledError,
    check_read,
)
from pipeline.devices.messages import (
    BEFORE,
    BEHIND,
    SHARE,
    PartHeader,
    Peer,
    SegmentDescription,
    Trouble,
    neighbour_name,
    secret_for,
)
from pipeline.stage import run_stage

ALIVE_S = 1.0  # interval of signs of life
_IMPORTS_S = 60.0  # time for importing a model's libraries on a small or busy device
_MOST_UNSENT = 64  # unsent answers beyond which further commands must wait
_UNLOADED = Frame(FrameKind.LOAD, 0, 0, 0)
_log = logging.getLogger(__name__)
Dial = Callable[[DeviceAddress, str, str], FrameStream]


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """The current step is aborted, by the control unit or because the daemon ends."""


@dataclass
class Session:
    """Executes the frames of ``control`` in the order in which they arrive.

    Any control frame but a part aborts the running step. ``neighbours`` are the streams of
    neighbours by their names. ``arrived`` is set by every stream of the session, and whenever
    ``leaving`` is set. ``held`` and ``neighbours`` change together, under a lock.
    """

    control: FrameStream
    hold: Callable[[SegmentDescription, HeldSegment | None], HeldSegment]
    dial: Dial
    arrived: threading.Event
    leaving: threading.Event
    held: HeldSegment | None = None
    neighbours: dict[str, FrameStream] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)
    _loaded: Frame = _UNLOADED  # the command that brought ``held``
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Run until the control unit ends the stream or is lost, or the daemon leaves."""
        keep_to_threads()
        done = threading.Event()
        try:
            threading.Thread(target=self._signs_of_life, args=(done,), daemon=True).start()
            while True:
                self._wait(self._may_obey, interruptible=False)
                self._obey(self.control.receive(0))
        except (LinkError, WireError) as error:
            _log.info("%s", error)
        except Interrupted:
            self._report(LinkError("this device is leaving"), self._loaded)
        finally:
            done.set()
            self._release()  # at once, because the next session needs the memory
            self.control.close()

    def attach(self, name: str, secret: str, stream: FrameStream) -> None:
        """Attach the stream of a neighbour that dialled this device. Raises ``RefusedLinkError`` if
        it is no neighbour or its secret is wrong, and ``BusyLinkError`` for a second stream."""
        with self._changing:  # the session's thread may replace the segment at the same time
            held = self.held
            if held is None or secret_for(held.description.session, name) != secret:
                raise RefusedLinkError("no segment here has such a session")
            if name not in held.description.neighbours:
                raise RefusedLinkError("this segment has no such neighbour")
            if name.startswith(SHARE):
                stream.max_bytes = held.part_bytes + MOST_JSON_BYTES
            else:
                stream.max_bytes = held.description.most_bytes_from(name, stream.max_bytes)
            if self.neighbours.setdefault(name, stream) is not stream:
                raise BusyLinkError(f"there is a stream from {name} already")

    def _release(self) -> HeldSegment | None:
        """Release the current segment, end its streams, and return it."""
        with self._changing:
            earlier, self.held, self._loaded = self.held, None, _UNLOADED
            streams, self.neighbours = self.neighbours, {}
        for stream in streams.values():
            stream.close()
        return earlier

    def _may_obey(self) -> bool:
        return self.control.waiting() and self.control.backlog()[0] < _MOST_UNSENT

    def _obey(self, frame: Frame) -> None:
        commands = {
            FrameKind.LOAD: self._load,
            FrameKind.PART: self._part,
            FrameKind.OPEN: self._open,
            FrameKind.BEGIN: self._begin,
            FrameKind.STEP: self._step,
            FrameKind.STATE: self._send_state,
            FrameKind.CLOCK: self._send_time,
        }
        try:
            if frame.kind not in commands:
                raise WireError(f"a control unit does not send {frame.kind.name}")
            commands[frame.kind](frame)
        except Interrupted:
            self._give_up()
            if self.leaving.is_set():
                raise
        except Exception as error:  # reported; the daemon continues
            self._give_up()
            self._report(error, frame)

    def _load(self, frame: Frame) -> None:
        earlier = self._release()
        self.control.drop_parts()  # these belong to the plan before
        description = unpacked(SegmentDescription, frame.only(1)[0])
        with self.activity.busy(after_s=_IMPORTS_S):
            self.held = self.hold(description, earlier)
        self._loaded = frame
        self.control.max_bytes = max(self.control.max_bytes, self.held.part_bytes)
        span = description.span
        _log.info(
            "unit %d, round %d: blocks %d … %d, stage %d of %d",
            *(description.unit, description.round, span.first, span.stop - 1),
            *(description.stage + 1, description.num_segments),
        )
        self._answer(frame, FrameKind.WANTED, packed(self.held.wanted))

    def _part(self, frame: Frame) -> None:
        if self.held is not None and frame.epoch < self.held.description.epoch:
            return  # of an earlier plan
        header, data = frame.only(2)
        held = self._held(frame)
        began = held.built
        with self.activity.busy():
            held.add(unpacked(PartHeader, header), as_bytes(data))
        if held.built > began:
            self._answer(frame, FrameKind.BUILT)

    def _open(self, frame: Frame) -> None:
        held = self._held(frame)
        for peer in held.description.peers:
            self._check_commands()
            self._open_to(held.description, peer)
        self._answer(frame, FrameKind.READY)
        if held.built:
            self._answer(frame, FrameKind.BUILT)

    def _open_to(self, own: SegmentDescription, peer: Peer) -> None:
        """Dial a device of the next stage, or another device of this segment."""
        side = SHARE if peer.neighbour.startswith(SHARE) else BEFORE
        self.activity.moved_s = time.monotonic()
        try:
            stream = self.dial(peer.address, peer.secret, neighbour_name(side, own.member))
        except LinkError as error:
            raise UndialledError(peer.neighbour, str(error)) from error
        try:
            self.attach(peer.neighbour, secret_for(own.session, peer.neighbour), stream)
        except LinkError:
            stream.close()
            raise

    def _begin(self, frame: Frame) -> None:
        """Run forward and backward of a batch; then send the norms and the times of each action.

        The first forward pass waits for each block's weights, which may still arrive.
        """
        held = self._held(frame)
        d = held.description
        fence = Fence.of(d, held.spec, frame.step, shapes(frame, d.num_micro_batches))
        sizes = [rows for rows, _ in fence.shapes]
        if not d.neighbours <= self.neighbours.keys():
            raise LinkError("a neighbour has not dialled yet")
        check_read(self.neighbours)
        before, after = (Side.of(d, self.neighbours, each) for each in (BEFORE, BEHIND))
        returns = d.first_trained < d.span.stop
        hops = StreamPorts(before, after, fence, self._wait, sizes, returns)
        around = *before.streams.values(), *after.streams.values()
        ports = TimedPorts(hops, around, self.activity.set_busy, self.arrived)
        stage = held.stage(frame.step, sizes, partial(self._wait_for, held, ports))
        actions = schedule.build(d.schedule, d.num_segments, len(sizes))[d.stage]
        for done, _ in enumerate(run_stage(actions, stage, ports)):
            self.activity.progress = frame, done
            self._take_parts()
            self._check_commands()
        self.activity.progress = frame, len(actions)
        self._wait(lambda: ports.all_sent() and held.built)  # a device without rows has not waited
        norms = torch.tensor(self._norms(held, frame), dtype=torch.float64)
        sent = sum(stream.bytes_out for stream in self.neighbours.values())
        usage = torch.tensor([sent, peak_bytes()], dtype=torch.float64)
        self._answer(frame, FrameKind.NORMS, norms, ports.table(), usage)

    def _wait_for(self, held: HeldSegment, ports: TimedPorts, block: str) -> None:
        """Wait for a block's weights during an action, which begins after them."""
        began = time.monotonic()
        self.activity.set_busy(None)
        self._wait(lambda: held.has(block))
        ports.postpone(time.monotonic() - began)

    def _norms(self, held: HeldSegment, frame: Frame) -> list[float]:
        """Return the squared norms of the blocks that this device leads, after the exchange of
        gradients with the segment's other devices."""
        if (exchange := held.exchange) is not None:
            for member in held.description.others:
                stream = self.neighbours[neighbour_name(SHARE, member)]
                self._send_later(stream, frame, held.gradients_for(member))
            self.activity.progress = frame, self.activity.progress[1] + 1
            complete = partial(self._exchanged, exchange, frame.step, exchange.has_gradients)
            self._wait(complete)
        with self.activity.busy():
            held.add_up(frame.step)
            return [part.squared_norm() for part in held.led]

    def _exchanged(self, exchange: Exchange, step: int, arrived: Callable[[int], bool]) -> bool:
        """Take some of the parts that other devices of the segment have sent in a step. Returns
        whether all of them have ``arrived``."""
        if exchange.take_waiting(self.neighbours, step):
            self.arrived.set()
        return arrived(step)

    def _step(self, frame: Frame) -> None:
        held = self._held(frame)
        rate, scale = numbers(frame, 2)
        self._wait(lambda: self._may_change(held), interruptible=False)
        with self.activity.busy():
            held.step(rate, scale)
        if (exchange := held.exchange) is not None:
            weights = list(exchange.weights_of(held.parts))
            for member in held.description.others:
                self._send_later(self.neighbours[neighbour_name(SHARE, member)], frame, weights)
            complete = partial(self._exchanged, exchange, frame.step, exchange.has_weights)
            self._wait(lambda: self._given_up() or complete(), interruptible=False)
            if not exchange.has_weights(frame.step):
                return
        with self.activity.busy():
            held.finish(frame.step)
        every = held.description.replicate_every
        if every and (frame.step + 1) % every == 0:
            self._send_parts(frame)

    def _may_change(self, held: HeldSegment) -> bool:
        """Whether the step may change the blocks: they have their optimiser state, and pending
        copies are made. Also true if the step is given up."""
        self._take_parts()
        made = all(each.all_made() for each in (self.control, *self.neighbours.values()))
        return (made and held.complete) or self._given_up()

    def _given_up(self) -> bool:
        """Whether the control unit has left, or sent a command that needs no step before it."""
        others = FrameKind.BEGIN, FrameKind.STATE, FrameKind.PART
        return self.control.over or self.control.has_other(*others)

    def _take_parts(self) -> None:
        """Add the parts that arrive while a step is under way."""
        while self.control.backlog()[0] < _MOST_UNSENT and (part := self.control.take_part()):
            self._obey(part)

    def _send_state(self, frame: Frame) -> None:
        self._wait(self.control.all_made, interruptible=False)  # one copy of the blocks at a time
        self._send_parts(frame)

    def _send_time(self, frame: Frame) -> None:
        self._answer(frame, FrameKind.CLOCK, torch.tensor(time.monotonic(), dtype=torch.float64))

    def _send_parts(self, frame: Frame) -> None:
        self._send_later(self.control, frame, self._held(frame).packed_parts())

    def _send_later(self, stream: FrameStream, frame: Frame, parts: Iterable[Packed]) -> None:
        for header, pack in parts:
            stream.send_later(partial(self._part_of, frame, header, pack))

    def _part_of(self, frame: Frame, header: Header, pack: Callable[[], Tensor]) -> Frame:
        return replace(frame, kind=FrameKind.PART, tensors=(packed(header), pack()))

    def _held(self, frame: Frame) -> HeldSegment:
        if self.held is None:
            raise WireError(f"{frame.kind.name} without a segment")
        d = self.held.description
        if (frame.round, frame.epoch) != (d.round, d.epoch):
            raise WireError(f"{frame.kind.name} of round {frame.round}, epoch {frame.epoch}")
        return self.held

    def _answer(self, frame: Frame, kind: FrameKind, *tensors: Tensor) -> None:
        self.control.send(replace(frame, kind=kind, tensors=tensors))

    def _report(self, error: Exception, frame: Frame) -> None:
        blamed = error.neighbour if isinstance(error, HopError) else None
        trouble = Trouble(type(error).__name__, one_line(error), blamed)
        _log.warning("%s: %s", trouble.kind, trouble.message)
        self._answer(frame, FrameKind.FAILED, packed(trouble))

    def _give_up(self) -> None:
        self.activity.set_busy(None)
        if self.held is not None:
            self.held.forget()

    def _check_commands(self) -> None:
        """Raise ``Interrupted`` if the daemon leaves, or a control frame other than a part
        waits."""
        if self.leaving.is_set() or self.control.over or self.control.has_other(FrameKind.PART):
            raise Interrupted

    def _wait(self, condition: Callable[[], bool], interruptible: bool = True) -> None:
        while not condition():
            self.arrived.clear()
            if self.leaving.is_set():
                raise Interrupted
            if interruptible:
                self._take_parts()
                self._check_commands()
            if not condition():
                self.arrived.wait(ALIVE_S)

    def _signs_of_life(self, done: threading.Event) -> None:
        while not done.wait(ALIVE_S):
            streams = self.control, *self.neighbours.values()
            alive = self.activity.sign_of_life(each.last_moved_s for each in streams)
            if self.control.backlog()[0] < 2 * _MOST_UNSENT:
                self.control.send(alive)
