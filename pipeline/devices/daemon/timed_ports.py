"""The times of a step's actions on this device."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream
from pipeline.devices.hops import FRAMES, StreamPorts
from pipeline.schedule import Action
from pipeline.stage import Passed


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
            stream.on_sent = partial(self._has_left, number)

    def holds(self, action: Action) -> bool:
        return self.ports.holds(action)

    def receive(self, action: Action) -> Passed:
        asked = time.monotonic()
        received = self.ports.receive(action)
        began = time.monotonic()
        self.on_busy(began)
        self._rows.append((action, asked, began, began))
        return received

    def postpone(self, seconds: float) -> None:
        """Leave out as many seconds of the current action, in which it waited for weights."""
        action, asked, began, ended = self._rows[-1]
        self._rows[-1] = action, asked + seconds, began + seconds, ended
        self.on_busy(time.monotonic())

    def send(self, action: Action, made: Passed) -> None:
        made = tuple(each.cpu() for each in made)  # waits until a GPU has computed it
        _, asked, began, _ = self._rows[-1]
        self._rows[-1] = action, asked, began, time.monotonic()
        self.on_busy(None)
        self.ports.send(action, made)

    def all_sent(self) -> bool:
        """Whether all outputs have been sent, or a stream has ended."""
        self._ending = True
        return len(self._sent) == self.ports.num_sent or any(each.over for each in self.streams)

    def table(self) -> Tensor:
        """Return the actions' times, float64 [actions, 4], in seconds by the device's clock."""
        last = dict[tuple[FrameKind, int], float]()
        for (kind, micro_batch, _), sent in self._sent.items():
            last[kind, micro_batch] = max(sent, last.get((kind, micro_batch), sent))
        rows = [
            (*times, last.get((FRAMES[action.kind], action.micro_batch), times[-1]))
            for action, *times in self._rows
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def _has_left(self, number: int, frame: Frame) -> None:
        self._sent[frame.kind, frame.micro_batch, number] = time.monotonic()
        if self._ending:  # else nobody waits for it
            self.arrived.set()
