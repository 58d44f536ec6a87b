"""Predict a unit's traffic on the decoder link in a round, exact to the byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.models.sent_rows import RowsRead
from collapipe.seeds import derive
from collapipe.tasks.task import Examples
from collapipe.tensors import Batch
from collapipe.wire import frames
from collapipe.wire.compression import layout, sent_share
from pipeline.micro_batch import split

_SAMPLED = 64  # batches; about a second for tens of thousands of rows


@dataclass(frozen=True, slots=True)
class LinkFormat:
    """The format that, with the batches, determines the size of the frames on a unit's link."""

    num_parts: int  # embedding and blocks, L + 1; each has a gradient norm
    dim: int
    dtype: torch.dtype  # of the model's computation
    gradient: str  # precision of received gradients
    rows: RowsRead  # the rows that are sent
    feedback: bool = False  # whether row numbers are sent with the activations

    def answers(self, micro_batches: Sequence[Batch]) -> int:
        """Bytes of the answers: frames with each micro-batch's loss and gradient."""
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
    """Return the micro-batches of at most ``_SAMPLED`` evenly spaced steps of a first epoch.
    ``seed`` is the seed of the unit's data."""
    lengths = examples.lengths
    epoch = len(lengths) // min(batch_size, len(lengths))
    count = min(epoch, _SAMPLED)
    rows = (batch_rows(lengths, batch_size, i * epoch // count, seed) for i in range(count))
    return [split(examples.batch(each.tolist()), num_micro_batches) for each in rows]


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """The expected traffic on a unit's link in a round."""

    form: LinkFormat
    local_steps: int
    steps: Sequence[Sequence[Batch]]  # micro-batches of sampled steps of the first epoch
    preset_bits: float | None  # float32 bits of a step's activations, and of its gradients

    @classmethod
    def of(cls, settings: Settings, unit: int, examples: Examples) -> "LinkTraffic":
        """Predict the traffic for the unit's own rows."""
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
        """Return z_n^enc, the bits that are sent with activations in this precision: the frames'
        bits, or the preset's scaled bits."""
        if self.preset_bits is not None:
            return self.local_steps * self.preset_bits * sent_share(self.form.dim, precision)
        step = fmean(self.form.step(each, precision) for each in self.steps)
        return 8 * self.local_steps * step

    @property
    def down_bits(self) -> float:
        """The bits of the received gradients."""
        if self.preset_bits is not None:
            share = sent_share(self.form.dim, self.form.gradient)
            return self.local_steps * self.preset_bits * share
        return 8 * self.local_steps * fmean(map(self.form.answers, self.steps))
