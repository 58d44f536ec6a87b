"""The devices of a cluster, and the control unit's connection to each: commands, answers and signs
of life."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from collapipe.errors import (
    CollaPipeError,
    LinkError,
    StageError,
    StorageError,
    WireError,
    one_line,
)
from collapipe.plan import ClusterPlan
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import Channels, Dialer
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.grpc_errors import reason
from pipeline.devices.control_unit.measurements import MOST_S
from pipeline.devices.encoding import from_json, numbers, unpacked
from pipeline.devices.messages import (
    CONTROL,
    HOP,
    NEIGHBOUR,
    SESSION,
    STATUS,
    DeviceStatus,
    Trouble,
    secret_for,
)

_FEW_BYTES = 2**20  # limit of an answer, and of a hop's frame before any activation was sent
SILENT_S = 5.0  # a device is lost after this time without a sign of life
_MOST_ANSWERS = 64  # limit of answers that were not requested
_ANSWERS = FrameKind.WANTED, FrameKind.READY, FrameKind.NORMS, FrameKind.CLOCK
OnPart = Callable[[str, Frame], None]
"""Called with the device's name and its PART."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a cluster, how to reach them, and how to plan again without lost ones."""

    devices: Mapping[str, DeviceAddress]
    channels: Channels
    # Makes a plan without the given lost devices (name → cause), and with fewer blocks for those
    # that refused so many (name → blocks and cause). Raises an error if there is no such plan.
    replan: Callable[[Mapping[str, str], Mapping[str, tuple[int, str]]], ClusterPlan]
    hung_s: Callable[[ClusterPlan], float]  # after this time in one action a device counts as hung
    # tensors between devices go through the control unit, so that devices do not dial each other
    relay: bool = False
    # Planned bytes for a number of blocks, the number of micro-batches that are kept at the same
    # time, a part of each micro-batch's rows, the number of blocks' gradients beyond one set, and
    # whether the device recomputes; it refuses more than it offers.
    needed_bytes: Callable[[int, int, float, int, bool], float] = lambda *_: 0.0
    # seconds until a device that serves another caller is an error; None: lost after ``hung_s``
    busy_s: float | None = None


def ask_status(dialer: Dialer, device: DeviceAddress, request: bytes = b"") -> DeviceStatus:
    """Ask for the status of ``device``; the ``request`` may be ``BRIEF``.

    Raises ``LinkError`` if the device cannot be reached, does not answer within the dialer's
    timeout, or sends an invalid answer.
    """
    with dialer.channel(device.name, device.address) as channel:
        try:
            answer = channel.unary_unary(STATUS)(request, timeout=dialer.timeout_s)
            return from_json(DeviceStatus, answer)
        except grpc.RpcError as error:
            why = f"{reason(error)}{dialer.hint}"
            raise LinkError(f"{device.name} at {device.address}: {why}") from error
        except WireError as error:
            why = f"{error}; check that its version is the same"
            raise LinkError(f"{device.name} at {device.address}: {why}") from error


class DeviceConnection:
    """A device's streams during a round, over ``channels`` that outlive it. ``arrived`` is set when
    the device sends a frame.

    ``control`` is for sending; this class receives its frames. ``answered_s`` is when the last
    answer that ``answer`` returned has arrived.
    Parts from the device may have at most ``part_bytes``. Raises ``StageError`` if the device does
    not answer or refuses the connection.
    """

    def __init__(
        self,
        device: DeviceAddress,
        channels: Channels,
        arrived: threading.Event,
        on_part: OnPart,
        part_bytes: int,
    ) -> None:
        self.name, self._arrived = device.name, arrived
        self._device, self._channels = device, channels
        self._on_part = on_part
        self.troubles: dict[int, Trouble] = {}  # the last one, by its epoch
        self.broken: CollaPipeError | None = None
        self.busy_s = self.answered_s = 0.0
        self._reported_s, self._storing = time.monotonic(), False
        self.progress = Frame(FrameKind.ALIVE, 0, 0, 0), 0  # its step, and its finished actions
        self.built, self.built_s = -1, 0.0  # the last epoch with all weights, and since when
        self._answers: queue.SimpleQueue[tuple[float, Frame]] = queue.SimpleQueue()
        self.control = self._opened(CONTROL, part_bytes, threading.Event())
        threading.Thread(target=self._listen, daemon=True, name=f"hear {device.name}").start()

    def close(self) -> None:
        """End the control stream; the owner of hops ends those."""
        self.control.close()

    def drop(self) -> None:
        """End all streams, and close the channels: the device is lost."""
        self.close()
        self._channels.drop(self._device)

    def answer(self, like: Frame) -> Frame | None:
        """Return the answer of the kind, round, epoch and step of ``like``, or None if it has not
        arrived. Other answers are dropped."""
        while not self._answers.empty():
            self.answered_s, frame = self._answers.get()
            if replace(frame, tensors=()) == like:
                return frame
        return None

    def hop(self, session: str, neighbour: str) -> FrameStream:
        """Open a stream to the device as its ``neighbour`` of this name."""
        metadata = (SESSION, secret_for(session, neighbour)), (NEIGHBOUR, neighbour)
        return self._opened(HOP, _FEW_BYTES, self._arrived, metadata)

    def check(self, hung_s: float) -> None:
        """Raise ``StageError`` if the device is lost or its current action exceeds ``hung_s``.
        Raises ``StorageError`` if this machine cannot store the device's blocks."""
        if isinstance(self.broken, StorageError):  # of this machine
            raise self.broken
        if self.broken is not None:
            try:
                self._channels.check(self._device, CONTROL)  # says more than the end of a stream
            except WireError as error:
                raise StageError(self.name, str(error)) from error
            raise StageError(self.name, str(self.broken))
        if (silent_s := self.control.silent_s) > SILENT_S:
            raise StageError(self.name, f"no sign of life for {silent_s:.1f} s")
        if self.busy_s > hung_s:
            raise StageError(self.name, f"hangs in one action for {self.busy_s:.0f} s")

    @property
    def moved_s(self) -> float:
        """When the device, as it reports, last computed, sent or received anything; now while this
        machine stores its blocks."""
        if self._storing:
            return time.monotonic()
        return max(self._reported_s, self.control.last_moved_s)

    def _opened(
        self,
        method: str,
        max_bytes: int,
        arrived: threading.Event,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> FrameStream:
        """Open a stream; methods have separate channels, so commands do not wait for tensors."""
        try:
            return self._channels.stream(
                self._device, method, max_bytes, arrived, metadata, has_data=method == HOP
            )
        except LinkError as error:
            raise StageError(self.name, str(error)) from error

    def _listen(self) -> None:
        try:
            while True:
                self._handle(self.control.receive())
                self._arrived.set()
        except CollaPipeError as error:
            self.broken = error
        except Exception as error:  # invalid frames make the device count as lost
            self.broken = WireError(one_line(error))
        self._arrived.set()

    def _handle(self, frame: Frame) -> None:
        self._channels.check(self._device, CONTROL)  # it may be revoked during a round
        if frame.kind == FrameKind.CLOCK and abs(numbers(frame, 1)[0]) > MOST_S:
            raise WireError(f"{self.name} sent an impossible time")
        if frame.kind == FrameKind.ALIVE:
            self.busy_s, still_s, done = numbers(frame, 3)
            self.progress = frame, int(done)
            self._reported_s = max(self._reported_s, time.monotonic() - max(0.0, still_s))
        elif frame.kind == FrameKind.BUILT:
            self.built, self.built_s = frame.epoch, time.monotonic()
        elif frame.kind == FrameKind.PART:
            self._storing = True
            self._on_part(self.name, frame)
            self._storing = False
        elif frame.kind == FrameKind.FAILED:
            trouble = unpacked(Trouble, frame.only(1)[0])
            if frame.epoch >= max(self.troubles, default=0):
                self.troubles = {frame.epoch: trouble}
        elif frame.kind not in _ANSWERS:
            raise WireError(f"{self.name} sent {frame.kind.name}")
        elif sum(each.nbytes for each in frame.tensors) > _FEW_BYTES:
            raise WireError(f"{self.name} sent an answer {frame.kind.name} that is too large")
        elif self._answers.qsize() >= _MOST_ANSWERS:
            raise WireError(f"{self.name} sent more than {_MOST_ANSWERS} unrequested answers")
        else:
            self._answers.put((time.monotonic(), frame))
