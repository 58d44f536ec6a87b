"""A device that the control unit has dialled: what it is told, and what it has answered."""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import cast

import grpc
from torch import Tensor

from collapipe.errors import (
    CollaPipeError,
    LinkError,
    StageError,
    StorageError,
    WireError,
    one_line,
)
from collapipe.wire.dialing import Dialer, open_stream
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.segments import (
    CONTROL,
    HOP,
    SESSION,
    SIDE,
    DeviceAddress,
    Trouble,
    as_bytes,
    as_view,
    secret_for,
    unpacked,
)
from collapipe.wire.streams import FrameStream

_FEW_BYTES = 2**20  # more than an answer has, or a hop before an activation was sent
SILENT_S = 5.0  # without a sign of life a device is gone
_MOST_ANSWERS = 64  # that nobody has asked for
OnPart = Callable[[str, int, str, int, int, memoryview], None]
"""Gets a device, an epoch, a block's name, a step, how many such follow, and tensors."""


class DeviceConnection:
    """A device's control stream, for a round. ``arrived`` is set when it says anything.

    It sends parts of at most ``part_bytes``. Raises ``StageError`` where the device does not
    answer, or refuses.
    """

    def __init__(
        self,
        device: DeviceAddress,
        dialer: Dialer,
        arrived: threading.Event,
        on_part: OnPart,
        part_bytes: int,
    ) -> None:
        self.name, self._arrived = device.name, arrived
        self._on_part = on_part
        self.troubles: dict[int, Trouble] = {}  # the last one, by its epoch
        self.broken: CollaPipeError | None = None
        self.busy_s = 0.0
        self._answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._channels = list[grpc.Channel]()
        try:
            for _ in range(2):  # so that commands do not wait behind tensors
                self._channels.append(dialer.channel(device.name, device.address))
        except LinkError as error:
            self.close()
            raise StageError(device.name, str(error)) from error
        try:
            self._control = open_stream(
                self._channels[0], CONTROL, device.name, part_bytes, threading.Event()
            )
        except LinkError as error:
            self.close()
            raise StageError(device.name, str(error)) from error
        threading.Thread(target=self._listen, daemon=True, name=f"hear {device.name}").start()

    def close(self) -> None:
        """End all streams."""
        for channel in self._channels:
            channel.close()

    def tell(self, kind: FrameKind, where: Frame, *tensors: Tensor) -> None:
        """Send a command that belongs to the round, step and epoch of ``where``."""
        self._control.send(Frame(kind, where.round, where.step, 0, tensors, where.epoch))

    def drop_parts(self) -> None:
        """Send no part any more that has not begun."""
        self._control.drop_parts()

    def excuse(self) -> None:
        """Nobody has listened for a while: it may have said something."""
        self._control.heard = time.monotonic()

    def send_later(self, make: Callable[[], Frame]) -> None:
        """Send a part that is made when it is its turn."""
        self._control.send_later(make)

    def answer(self, kind: FrameKind, where: Frame) -> Frame | None:
        """The answer of this kind to a command that belonged ``where``, if it has come; others are
        dropped."""
        place = where.round, where.step, where.epoch
        while not self._answers.empty():
            frame = self._answers.get()
            if frame.kind == kind and (frame.round, frame.step, frame.epoch) == place:
                return frame
        return None

    def hop(self, session: str, side: str) -> FrameStream:
        """The stream of a neighbour, where the control unit stands on that ``side``."""
        said = (SESSION, secret_for(session, side)), (SIDE, side)
        try:
            return open_stream(self._channels[1], HOP, self.name, _FEW_BYTES, self._arrived, said)
        except LinkError as error:
            raise StageError(self.name, str(error)) from error

    def check(self, hung_s: float) -> None:
        """Raise ``StageError`` where the device is gone, or has hung for ``hung_s``."""
        if isinstance(self.broken, StorageError):  # of this machine
            raise self.broken
        if self.broken is not None:
            raise StageError(self.name, str(self.broken))
        silent_s = time.monotonic() - self._control.heard
        if silent_s > SILENT_S:
            raise StageError(self.name, f"no sign of life for {silent_s:.1f} s")
        if self.busy_s > hung_s:
            raise StageError(self.name, f"hangs in one action since {self.busy_s:.0f} s")

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._control.receive())
                self._arrived.set()
        except OSError as error:
            self.broken = StorageError(f"copies of blocks cannot be written: {error}; make room")
            self._arrived.set()
        except Exception as error:  # whatever it sent: it is done without
            ours = isinstance(error, CollaPipeError)
            self.broken = cast(CollaPipeError, error) if ours else WireError(one_line(error))
            self._arrived.set()

    def _hear(self, frame: Frame) -> None:
        if frame.kind == FrameKind.CLOCK and (
            [each.numel() for each in frame.tensors] != [1] or not math.isfinite(frame.tensors[0])
        ):
            raise WireError(f"{self.name} sent {len(frame.tensors)} tensors as the time")
        if self._answers.qsize() > _MOST_ANSWERS:
            raise WireError(f"{self.name} sent more than {_MOST_ANSWERS} answers unasked")
        if frame.kind == FrameKind.ALIVE and len(frame.tensors) == 1:
            self.busy_s = float(frame.tensors[0])
        elif frame.kind == FrameKind.PART and len(frame.tensors) == 2:
            name, data = frame.tensors
            place = as_bytes(name).decode("ascii", "replace"), frame.step, frame.micro_batch
            self._on_part(self.name, frame.epoch, *place, as_view(data))
        elif frame.kind == FrameKind.FAILED and len(frame.tensors) == 1:
            if frame.epoch >= max(self.troubles, default=0):
                self.troubles = {frame.epoch: unpacked(Trouble, frame.tensors[0])}
        elif frame.kind in (FrameKind.READY, FrameKind.NORMS, FrameKind.CLOCK):
            if sum(each.nbytes for each in frame.tensors) > _FEW_BYTES:
                raise WireError(f"{self.name} answered too much with {frame.kind.name}")
            self._answers.put(frame)
        else:
            raise WireError(f"{self.name} sent {frame.kind.name}")
