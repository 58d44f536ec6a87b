"""Tensors between neighbours: ports over streams, the check of their frames, and relayed hops."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.errors import LinkError, WireError
from collapipe.tensors import is_mask
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream
from pipeline.devices.messages import BEFORE, BEHIND
from pipeline.hop_codec import HopCodec
from pipeline.schedule import FORWARD, Action
from pipeline.stage import Passed


class HopError(LinkError):
    """The stream to a neighbour ended or delivered an invalid frame. ``side`` is the neighbour's
    position, ``before`` or ``behind``."""

    def __init__(self, side: str, cause: str) -> None:
        super().__init__(cause)
        self.side = side


class UndialledError(HopError):
    """A device cannot dial the next one of the plan."""


Wait = Callable[[Callable[[], bool]], None]
"""Blocks until a condition is true; raises an error if it cannot become true."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The round, epoch and step of valid frames, and the form of their tensors: [b, s, d], encoded
    by the ``codec``."""

    round: int
    epoch: int
    step: int
    dim: int
    codec: HopCodec

    def frame(self, kind: FrameKind, micro_batch: int = 0, *tensors: Tensor) -> Frame:
        """Make a frame of this round, epoch and step."""
        return Frame(kind, self.round, self.step, micro_batch, tensors, self.epoch)

    def received(self, frame: Frame, kind: FrameKind, micro_batch: int, peer: str) -> Passed:
        """Return the tensors of ``frame``. Raises ``WireError`` if it is not the expected
        frame."""
        wanted = self.round, self.epoch, self.step, micro_batch
        came = frame.round, frame.epoch, frame.step, frame.micro_batch
        if frame.kind != kind or came != wanted:
            raise WireError(
                f"{peer} sent {frame.kind.name} of round, epoch, step, micro-batch {came}; "
                f"expected {kind.name} of {wanted}"
            )
        hidden, *others = tensors = self.codec.decode(frame.tensors)
        fits = len(others) == (1 if kind == FrameKind.ACTIVATION else 0)
        fits = fits and hidden.dim() == 3 and hidden.shape[2] == self.dim
        fits = fits and hidden.numel() > 0  # without samples any length would fit
        if fits and kind == FrameKind.ACTIVATION:
            mask = others[0]
            fits = is_mask(mask) and mask.shape[0] == hidden.shape[0]
            fits = fits and mask.shape[1] <= hidden.shape[1]
        if not fits:
            shapes = [f"{each.dtype} {list(each.shape)}" for each in frame.tensors]
            raise WireError(f"{peer} sent {kind.name} of {', '.join(shapes) or 'nothing'}")
        return tensors


class StreamPorts:
    """Ports to the stages ``before`` and ``behind``; None if there is no such stage.

    The shape of each sent activation is kept, to check the gradient that returns for it. Without
    ``returns`` no gradient returns, and none is waited for.
    """

    def __init__(
        self,
        before: FrameStream | None,
        behind: FrameStream | None,
        fence: Fence,
        wait: Wait,
        returns: bool = True,
    ) -> None:
        self._before, self._behind, self._fence, self._wait = before, behind, fence, wait
        self._returns = returns
        self._sent: dict[int, torch.Size] = {}

    def holds(self, action: Action) -> bool:
        stream = self._source(action)
        return stream is None or stream.waiting()

    def receive(self, action: Action) -> Passed:
        forward = action.kind == FORWARD
        stream = self._source(action)
        if stream is None:
            return ()
        self._wait(lambda: self.holds(action))
        kind = FrameKind.ACTIVATION if forward else FrameKind.GRADIENT
        try:
            frame = stream.receive(0)  # nothing else reads this stream
            tensors = self._fence.received(frame, kind, action.micro_batch, stream.peer)
            shape = tensors[0].shape
            if not forward and shape != self._sent.pop(action.micro_batch):
                raise WireError(f"{stream.peer} sent a gradient of {list(shape)}")
        except (LinkError, WireError) as error:
            raise HopError(BEFORE if forward else BEHIND, str(error)) from error
        return tensors

    def send(self, action: Action, made: Passed) -> None:
        forward = action.kind == FORWARD
        stream = self._behind if forward else self._before
        if stream is None or not made:
            return
        if forward and self._returns:
            self._sent[action.micro_batch] = made[0].shape
        kind = FrameKind.ACTIVATION if forward else FrameKind.GRADIENT
        encoded = self._fence.codec.encode(made)
        stream.send(self._fence.frame(kind, action.micro_batch, *encoded))

    def _source(self, action: Action) -> FrameStream | None:
        """The stream that brings the action's input, or None if it needs none."""
        if action.kind == FORWARD:
            return self._before
        return self._behind if self._returns else None


def relay(front: FrameStream, behind: FrameStream) -> None:
    """Forward frames between two streams in both directions until one ends; then close both.

    Returns at once; threads do the work. Frames that the receiver has not taken yet are kept in
    memory: at most the m activations or gradients of a step.
    """
    for source, sink in ((front, behind), (behind, front)):
        threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: FrameStream, sink: FrameStream) -> None:
    try:
        while True:
            sink.send(source.receive())
    except (LinkError, WireError):  # the control streams detect which device is lost
        sink.close()
        source.close()
