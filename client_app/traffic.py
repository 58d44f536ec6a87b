"""What a unit's steps put on the decoder link, to the byte, before any of it is sent."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from collapipe.batch import Batch
from collapipe.data.shards import batch_rows
from collapipe.tasks.task import Examples
from collapipe.wire import frames
from collapipe.wire.compression import layout
from pipeline.micro_batch import split

_SAMPLED = 64  # batches: a second for tens of thousands of rows
_BYE = frames.num_bytes([])


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of frames from the unit to the server, and back; whole, but for a mean."""

    bytes_up: float
    bytes_down: float


@dataclass(frozen=True, slots=True)
class LinkFormat:
    """What the size of a unit's frames depends on, apart from its batches.

    Attributes
    ----------
    num_parts
        Embedding and blocks, L + 1: each has a gradient norm.
    dim
        d, the width of the activations.
    dtype
        In which the model computes, and in which gradients come back.
    precision
        ``compression.activation``.
    extra_rows
        Rows of an activation behind those of the tokens, see ``models.cut.extra_rows``.
    """

    num_parts: int
    dim: int
    dtype: torch.dtype
    precision: str
    extra_rows: int = 0

    def step(self, hidden: Sequence[tuple[int, int, int]], widths: Sequence[int]) -> Traffic:
        """A step whose micro-batches have activations ``hidden`` [b̂, s + extra_rows, d] and targets
        [b̂, t] of these widths t: a begin, an activation each and the norms; gradients and a norm
        come back.
        """
        up = frames.num_bytes([(torch.int64, (2,))])
        up += frames.num_bytes([(torch.float64, (self.num_parts,))])
        down = frames.num_bytes([(torch.float64, (1,))])
        for shape, width in zip(hidden, widths, strict=True):
            samples, rows, _ = shape
            tokens = rows - self.extra_rows
            others = [(torch.bool, (samples, tokens)), (torch.int64, (samples, width))]
            up += frames.num_bytes([*layout(shape, self.dtype, self.precision), *others])
            down += frames.num_bytes([(torch.float64, ()), (self.dtype, shape)])
        return Traffic(up, down)

    def step_of(self, batch: Batch, num_micro_batches: int) -> Traffic:
        """The step that trains on ``batch``."""
        parts = split(batch, num_micro_batches)
        shapes = [part.mask.shape for part in parts]
        hidden = [(samples, tokens + self.extra_rows, self.dim) for samples, tokens in shapes]
        return self.step(hidden, [part.targets.shape[1] for part in parts])


def round_of(steps: Iterable[Traffic]) -> Traffic:
    """A whole round: its steps, and a farewell each way."""
    every = [*steps, Traffic(_BYE, _BYE)]
    return Traffic(sum(step.bytes_up for step in every), sum(step.bytes_down for step in every))


def expected_step(
    form: LinkFormat, examples: Examples, batch_size: int, num_micro_batches: int, seed: int
) -> Traffic:
    """Mean of the steps on a first epoch's batches, at most ``_SAMPLED`` of them, evenly spaced;
    ``seed`` is that of the unit's data."""
    batches = _batches(examples, batch_size, seed)
    steps = [form.step_of(batch, num_micro_batches) for batch in batches]
    up, down = (sum(step.bytes_up for step in steps), sum(step.bytes_down for step in steps))
    return Traffic(up / len(steps), down / len(steps))


def _batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Batch]:
    """Real ones: how a task pads is the task's affair."""
    lengths = examples.lengths
    epoch = len(lengths) // min(batch_size, len(lengths))
    count = min(epoch, _SAMPLED)
    for step in (index * epoch // count for index in range(count)):
        yield examples.batch(batch_rows(lengths, batch_size, step, seed).tolist())
