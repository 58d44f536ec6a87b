"""Which frames a device or the control unit accepts from a neighbour in a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.models.split import ModelSpec, table_rows
from collapipe.tensors import is_mask
from collapipe.wire.frames import Frame, FrameKind
from pipeline.devices.messages import RoundDescription
from pipeline.hop_codec import HopCodec
from pipeline.stage import Passed, Shapes


@dataclass(frozen=True, slots=True)
class Fence:
    """The round, epoch and step of valid frames, and the form of their tensors: [b, s, d], encoded
    by the ``codec``.

    A mask has the positions of its micro-batch in ``shapes``, and an activation at most
    ``table_rows`` more.
    """

    round: int
    epoch: int
    step: int
    shapes: Shapes
    dim: int
    table_rows: int
    codec: HopCodec

    @classmethod
    def of(cls, own: RoundDescription, spec: ModelSpec, step: int, shapes: Shapes) -> "Fence":
        """Return the fence of a step of this round with micro-batches of these ``shapes``."""
        codec = HopCodec(own.wire_dtype, getattr(torch, own.dtype))
        return cls(own.round, own.epoch, step, shapes, spec.dim, table_rows(spec), codec)

    def frame(self, kind: FrameKind, micro_batch: int = 0, *tensors: Tensor) -> Frame:
        """Make a frame of this round, epoch and step."""
        return Frame(kind, self.round, self.step, micro_batch, tensors, self.epoch)

    def received(self, frame: Frame, kind: FrameKind, micro_batch: int, peer: str) -> Passed:
        """Return the tensors of ``frame``. Raises ``WireError`` if it is not the expected
        frame."""
        wanted = self.round, self.epoch, self.step, micro_batch
        actual = frame.round, frame.epoch, frame.step, frame.micro_batch
        if frame.kind != kind or actual != wanted:
            raise WireError(
                f"{peer} sent {frame.kind.name} of round, epoch, step, micro-batch {actual}; "
                f"expected {kind.name} of {wanted}"
            )
        hidden, *others = tensors = self.codec.decode(frame.tensors)
        fits = len(others) == (1 if kind == FrameKind.ACTIVATION else 0)
        fits = fits and hidden.dim() == 3 and hidden.shape[2] == self.dim
        fits = fits and hidden.numel() > 0  # without samples any length would fit
        if fits and kind == FrameKind.ACTIVATION:
            mask = others[0]
            fits = is_mask(mask) and mask.shape[0] == hidden.shape[0]
            # more positions than the batch has would take their square in time
            fits = fits and mask.shape[1] == self.shapes[micro_batch][1]
            fits = fits and 0 <= hidden.shape[1] - mask.shape[1] <= self.table_rows
        if not fits:
            shapes = [f"{each.dtype} {list(each.shape)}" for each in frame.tensors]
            raise WireError(f"{peer} sent {kind.name} of {', '.join(shapes) or 'nothing'}")
        return tensors


def check_like_embedding(tensors: Passed, made: Passed, peer: str) -> None:
    """Raise ``WireError`` if an activation inside the fence has fewer positions than the
    embedding's, or another type of mask. Blocks may append rows to a sample, such as T5's first
    one."""
    (hidden, mask), (own, own_mask) = tensors, made
    if hidden.shape[1] < own.shape[1] or mask.dtype != own_mask.dtype:
        shapes = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors)
        raise WireError(f"{peer} sent {shapes}, unlike the embedding's activation")
