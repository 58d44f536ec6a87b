"""Tensors between neighbours: ports over streams, their times, relayed hops."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from collapipe.errors import LinkError, WireError
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.outbox import WINDOW
from pipeline.devices.fence import Fence, check_like_embedding
from pipeline.devices.messages import BEFORE, BEHIND, SegmentDescription, neighbour_name, place_of
from pipeline.schedule import BACKWARD, FORWARD, Action
from pipeline.stage import Passed


class HopError(LinkError):
    """The stream to the ``neighbour`` of this name ended or delivered an invalid frame."""

    def __init__(self, neighbour: str, cause: str) -> None:
        super().__init__(cause)
        self.neighbour = neighbour


class UndialledError(HopError):
    """A device cannot dial a neighbour."""


_LOOK_S = 0.002  # pause between looks whether a relayed frame was sent
FRAMES = {FORWARD: FrameKind.ACTIVATION, BACKWARD: FrameKind.GRADIENT}
"""The kind of frame that carries the output of an action of a kind."""
Wait = Callable[[Callable[[], bool]], None]
"""Blocks until a condition is true; raises an error if it cannot become true."""


@dataclass(frozen=True, slots=True)
class Side:
    """Streams to the devices of a neighbouring stage by their numbers, and the rows of each.

    ``split`` returns the range of own rows that each device has, of a micro-batch of as many rows.
    """

    streams: Mapping[int, FrameStream]
    split: Callable[[int], Sequence[tuple[int, int]]] = lambda rows: [(0, rows)]

    @classmethod
    def of(
        cls, own: SegmentDescription, neighbours: Mapping[str, FrameStream], side: str
    ) -> "Side":
        """Choose the ``side`` of a device from the streams of all its neighbours by their names."""
        places = ((place_of(name), stream) for name, stream in neighbours.items())
        streams = {at[1]: stream for at, stream in places if at is not None and at[0] == side}
        return cls(streams, cache(partial(own.rows_with, side)))  # asked for every action

    def used(self, rows: int) -> list[tuple[int, FrameStream, int, int]]:
        """Return the number, the stream and the range of rows of each device that has rows."""
        return [
            (place, self.streams[place], first, end)
            for place, (first, end) in enumerate(self.split(rows))
            if end > first
        ]


def check_read(neighbours: Mapping[str, FrameStream]) -> None:
    """Raise ``HopError`` if a neighbour, by its name, has not read all tensors of the last step."""
    for name, stream in neighbours.items():
        if stream.backlog()[1]:
            raise HopError(name, "has not read the tensors of the last step")


@dataclass
class StreamPorts:
    """Ports to the stages ``before`` and ``after``; None if there is no such stage.

    ``rows`` are those of each micro-batch; a stage without own rows receives nothing. The shape of
    each sent activation is kept, to check the gradient that returns for it. Without ``returns`` no
    gradient returns, and none is waited for. An activation has at least as many positions as its
    micro-batch has in ``like``, and the same type of mask.
    """

    before: Side | None
    after: Side | None
    fence: Fence
    wait: Wait
    rows: Sequence[int]
    returns: bool = True
    like: Mapping[int, Passed] = field(default_factory=dict)  # filled during the step
    num_sent: int = 0  # frames
    _sent: dict[int, torch.Size] = field(default_factory=dict)

    def holds(self, action: Action) -> bool:
        return all(stream.waiting() for _, stream, *_ in self._sources(action))

    def receive(self, action: Action) -> Passed:
        sources = self._sources(action)
        if not sources:
            return ()
        self.wait(lambda: self.holds(action))
        pieces = [self._received(action, *source) for source in sources]
        for (place, *_), piece in zip(sources, pieces, strict=True):
            if piece[0].shape[1:] != pieces[0][0].shape[1:]:
                name = _neighbour(action, place)
                raise HopError(name, "sent other shapes than a device of its segment")
        if action.kind != FORWARD:
            del self._sent[action.micro_batch]
        return pieces[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))

    def send(self, action: Action, made: Passed) -> None:
        forward = action.kind == FORWARD
        side = self.after if forward else self.before
        if side is None or not made:
            return
        if forward and self.returns:
            self._sent[action.micro_batch] = made[0].shape
        for _, stream, first, end in side.used(self.rows[action.micro_batch]):
            encoded = self.fence.codec.encode(tuple(each[first:end] for each in made))
            stream.send(self.fence.frame(FRAMES[action.kind], action.micro_batch, *encoded))
            self.num_sent += 1

    def _sources(self, action: Action) -> list[tuple[int, FrameStream, int, int]]:
        """The streams that bring the action's input, with their rows; empty if it needs none."""
        forward = action.kind == FORWARD
        side = self.before if forward else self.after
        if side is None or not (forward or self.returns):
            return []
        return side.used(self.rows[action.micro_batch])

    def _received(
        self, action: Action, place: int, stream: FrameStream, first: int, end: int
    ) -> Passed:
        forward, kind = action.kind == FORWARD, FRAMES[action.kind]
        try:
            frame = stream.receive(0)  # nothing else reads this stream
            tensors = self.fence.received(frame, kind, action.micro_batch, stream.peer)
            rows, *rest = tensors[0].shape
            expected = None if forward else list(self._sent[action.micro_batch][1:])
            if rows != end - first or (expected is not None and rest != expected):
                raise WireError(f"{stream.peer} sent {kind.name} of {[rows, *rest]}")
            if forward and (like := self.like.get(action.micro_batch)):
                check_like_embedding(tensors, like, stream.peer)
        except (LinkError, WireError) as error:
            raise HopError(_neighbour(action, place), str(error)) from error
        return tensors


def _neighbour(action: Action, place: int) -> str:
    """Return the name of the device number ``place`` that sends an action's input."""
    return neighbour_name(BEFORE if action.kind == FORWARD else BEHIND, place)


def relay(front: FrameStream, back: FrameStream) -> None:
    """Forward frames between two streams in both directions until one ends; then close both.

    Returns at once; threads do the work. A frame is taken from its sender only if fewer than
    ``WINDOW`` wait for the receiver, and a part only once the one before it is sent.
    """
    for source, sink in ((front, back), (back, front)):
        threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: FrameStream, sink: FrameStream) -> None:
    try:
        while True:
            frame = source.receive()
            while not sink.over and (not sink.all_made() or sum(sink.backlog()) >= WINDOW):
                time.sleep(_LOOK_S)
            sink.send(frame)
    except (LinkError, WireError):  # the control streams detect which device is lost
        sink.close()
        source.close()


@dataclass
class TimedPorts:
    """Ports that record when each action requested its input, began, ended and had sent its
    output.

    ``on_busy`` is called with the time at which an action began, and with None after it ended.
    ``arrived`` is set when one of the ``streams`` has sent an output.
    """

    ports: StreamPorts
    streams: Sequence[FrameStream]
    on_busy: Callable[[float | None], None]
    arrived: threading.Event
    _rows: list[tuple[Action, float, float, float]] = field(default_factory=list)
    # by kind, micro-batch and number of the stream
    _sent: dict[tuple[FrameKind, int, int], float] = field(default_factory=dict)
    _ending: bool = False

    def __post_init__(self) -> None:
        for number, stream in enumerate(self.streams):
            stream.on_sent = partial(self._record_sent, number)

    def holds(self, action: Action) -> bool:
        return self.ports.holds(action)

    def receive(self, action: Action) -> Passed:
        requested = time.monotonic()
        received = self.ports.receive(action)
        began = time.monotonic()
        self.on_busy(began)
        self._rows.append((action, requested, began, began))
        return received

    def postpone(self, seconds: float) -> None:
        """Leave out as many seconds of the current action, in which it waited for weights."""
        action, requested, began, ended = self._rows[-1]
        self._rows[-1] = action, requested + seconds, began + seconds, ended
        self.on_busy(time.monotonic())

    def send(self, action: Action, made: Passed) -> None:
        made = tuple(each.cpu() for each in made)  # waits until a GPU has computed it
        _, requested, began, _ = self._rows[-1]
        self._rows[-1] = action, requested, began, time.monotonic()
        self.on_busy(None)
        self.ports.send(action, made)

    def all_sent(self) -> bool:
        """Whether all outputs have been sent, or a stream has ended."""
        self._ending = True
        return len(self._sent) == self.ports.num_sent or any(each.over for each in self.streams)

    def table(self) -> Tensor:
        """Return the actions' times, float64 [actions, 4], in seconds by the device's clock."""
        last = dict[tuple[FrameKind, int], float]()
        # a copy, because streams may still add to it after one has ended
        for (kind, micro_batch, _), sent in tuple(self._sent.items()):
            last[kind, micro_batch] = max(sent, last.get((kind, micro_batch), sent))
        rows = [
            (*times, last.get((FRAMES[action.kind], action.micro_batch), times[-1]))
            for action, *times in self._rows
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def _record_sent(self, number: int, frame: Frame) -> None:
        self._sent[frame.kind, frame.micro_batch, number] = time.monotonic()
        if self._ending:  # else nobody waits for it
            self.arrived.set()
