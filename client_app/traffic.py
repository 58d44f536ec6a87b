"""What a unit's decoder link will carry in a round, to the byte, before any of it is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from collapipe.batch import Batch
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.models.sent_rows import RowsRead
from collapipe.seeds import derive
from collapipe.tasks.task import Examples
from collapipe.wire import frames
from collapipe.wire.compression import layout, sent_share
from pipeline.micro_batch import split

_SAMPLED = 64  # batches: a second for tens of thousands of rows


@dataclass(frozen=True, slots=True)
class LinkFormat:
    """What the size of the frames of a unit's link depends on, apart from its batches."""

    num_parts: int  # embedding and blocks, L + 1: each has a gradient norm
    dim: int
    dtype: torch.dtype  # in which the model computes
    gradient: str  # in which precision gradients come
    rows: RowsRead  # that travel
    feedback: bool = False  # numbers of the samples travel with them

    def share(self, precision: str) -> float:
        """Of an activation's bits in float32, in which a preset has them."""
        return sent_share(self.dim, precision)

    def answers(self, micro_batches: Sequence[Batch]) -> int:
        """Bytes of the frames with each micro-batch's loss and gradient."""
        shapes = [(self._count(part), self.dim) for part in micro_batches]
        return sum(
            frames.num_bytes([(torch.float64, ()), *layout(shape, self.dtype, self.gradient)])
            for shape in shapes
        )

    def step(self, micro_batches: Sequence[Batch], precision: str) -> int:
        """Bytes of a step's frames: a begin, an activation for each micro-batch, the norms.

        Activations are sent in ``precision``.
        """
        size = frames.num_bytes([(torch.int64, (2,))])
        size += frames.num_bytes([(torch.float64, (self.num_parts,))])
        for part in micro_batches:
            shape = (self._count(part), self.dim)
            others = [(torch.bool, part.mask.shape), (torch.int64, part.targets.shape)]
            others += [(torch.int64, part.mask.shape[:1])] if self.feedback else []
            size += frames.num_bytes([*layout(shape, self.dtype, precision), *others])
        return size

    def _count(self, micro_batch: Batch) -> int:
        return int(self.rows.of(micro_batch.mask, micro_batch.targets).sum())


def sampled_steps(
    examples: Examples, batch_size: int, num_micro_batches: int, seed: int
) -> list[Sequence[Batch]]:
    """Micro-batches of the steps of a first epoch, of at most ``_SAMPLED`` of them, evenly spaced;
    ``seed`` is that of the unit's data."""
    lengths = examples.lengths
    epoch = len(lengths) // min(batch_size, len(lengths))
    count = min(epoch, _SAMPLED)
    rows = (batch_rows(lengths, batch_size, i * epoch // count, seed) for i in range(count))
    return [split(examples.batch(each.tolist()), num_micro_batches) for each in rows]


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What a unit's link is expected to carry in a round."""

    form: LinkFormat
    local_steps: int
    steps: Sequence[Sequence[Batch]]  # micro-batches of some of the first epoch's steps
    preset_bits: float | None  # of a step's activations in float32, and of their gradients

    @classmethod
    def of(cls, settings: Settings, unit: int, examples: Examples) -> "LinkTraffic":
        """Of the unit's own rows."""
        spec, dtype = settings.model, getattr(torch, settings.pipeline.dtype)
        compression, rows = settings.compression, RowsRead.by(spec)
        precision, feedback = compression.gradient, compression.feedback
        form = LinkFormat(spec.num_blocks + 1, spec.dim, dtype, precision, rows, feedback)
        preset, sampled = settings.channel.activation_bits, list[Sequence[Batch]]()
        if preset is None:
            seed, parts = derive(settings.seed, "data", unit), settings.pipeline.num_micro_batches
            sampled = sampled_steps(examples, settings.batch_size, parts, seed)
        return cls(form, settings.federation.local_steps, sampled, preset)

    def up_bits(self, precision: str) -> float:
        """z_n^enc with activations in this precision: frames, or the preset's share."""
        if self.preset_bits is not None:
            return self.local_steps * self.preset_bits * self.form.share(precision)
        step = fmean(self.form.step(each, precision) for each in self.steps)
        return 8 * self.local_steps * step

    @property
    def down_bits(self) -> float:
        """Of the gradients that answer."""
        if self.preset_bits is not None:
            return self.local_steps * self.preset_bits * self.form.share(self.form.gradient)
        return 8 * self.local_steps * fmean(map(self.form.answers, self.steps))
