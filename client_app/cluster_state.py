"""What a unit reports of its cluster: devices, rows, and the bits that it will upload.

What its steps send over the decoder link is known to the byte, before any of it is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from collapipe.batch import Batch
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.devices.presets import ClusterPreset
from collapipe.models.cost import measure_cost, upload_bits
from collapipe.models.sent_rows import RowsRead
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tasks.task import Examples
from collapipe.text.tokenizer import Vocabulary
from collapipe.wire import frames
from collapipe.wire.compression import layout
from pipeline.micro_batch import split

_SAMPLED = 64  # batches: a second for tens of thousands of rows
BYE = frames.num_bytes([])  # of the farewell that ends a round


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """The cluster as it is now: its devices and uplink are drawn, once and for the run."""
    spec, rows = settings.model, len(examples.lengths)
    cluster: ClusterPreset = settings.build("cluster")
    cost = measure_cost(spec, settings.task.max_length, settings.batch_size, settings.optimizer)
    linked, precision = settings.server_has_heads, settings.compression.upload
    dtype = getattr(torch, settings.pipeline.dtype)
    up, down = _link_bits(settings, unit, examples) if linked else (0.0, 0.0)
    uplink = settings.channel.draw_uplink(
        model_bits=upload_bits(spec, vocabulary, precision, dtype, with_head=not linked),
        activation_bits=up,
        gradient_bits=down,
        num_samples=settings.federation.local_steps * settings.batch_size if linked else 0,
        rng=_generator(settings, "uplink", unit),
    )
    if not settings.framework.aggregate:  # its weights travel here to be evaluated, there never
        uplink = replace(uplink, model_bits=0.0)
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    return ClusterState(unit, devices, rows, uplink)


def _link_bits(settings: Settings, unit: int, examples: Examples) -> tuple[float, float]:
    """z_n^enc of a round, and the gradients that answer it.

    The preset's, for both; or the frames that the link is expected to carry.
    """
    steps, preset = settings.federation.local_steps, settings.channel.activation_bits
    if preset is not None:
        return steps * preset, steps * preset
    spec, dtype = settings.model, getattr(torch, settings.pipeline.dtype)
    precisions = settings.compression.activation, settings.compression.gradient
    form = LinkFormat(spec.num_blocks + 1, spec.dim, dtype, *precisions, RowsRead.by(spec))
    seed, parts = derive(settings.seed, "data", unit), settings.pipeline.num_micro_batches
    up, down = expected_step(form, examples, settings.batch_size, parts, seed)
    return 8 * sum([*[up] * steps, BYE]), 8 * steps * down


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))


@dataclass(frozen=True, slots=True)
class LinkFormat:
    """What the size of the frames of a unit's link depends on, apart from its batches."""

    num_parts: int  # embedding and blocks, L + 1: each has a gradient norm
    dim: int
    dtype: torch.dtype  # in which the model computes
    activation: str  # precisions
    gradient: str
    rows: RowsRead  # that travel

    def answers(self, micro_batches: Sequence[Batch]) -> int:
        """Bytes of the frames with each micro-batch's loss and gradient."""
        shapes = [(self._count(part), self.dim) for part in micro_batches]
        return sum(
            frames.num_bytes([(torch.float64, ()), *layout(shape, self.dtype, self.gradient)])
            for shape in shapes
        )

    def step(self, micro_batches: Sequence[Batch]) -> int:
        """Bytes of a step's frames: a begin, an activation for each micro-batch, the norms."""
        size = frames.num_bytes([(torch.int64, (2,))])
        size += frames.num_bytes([(torch.float64, (self.num_parts,))])
        for part in micro_batches:
            shape = (self._count(part), self.dim)
            others = [(torch.bool, part.mask.shape), (torch.int64, part.targets.shape)]
            size += frames.num_bytes([*layout(shape, self.dtype, self.activation), *others])
        return size

    def _count(self, micro_batch: Batch) -> int:
        return int(self.rows.of(micro_batch.mask, micro_batch.targets).sum())


def expected_step(
    form: LinkFormat, examples: Examples, batch_size: int, num_micro_batches: int, seed: int
) -> tuple[float, float]:
    """Bytes up and down: means of the steps on a first epoch's batches, at most ``_SAMPLED`` of
    them, evenly spaced; ``seed`` is that of the unit's data."""
    lengths = examples.lengths
    epoch = len(lengths) // min(batch_size, len(lengths))
    count = min(epoch, _SAMPLED)
    rows = [batch_rows(lengths, batch_size, i * epoch // count, seed) for i in range(count)]
    steps = (split(examples.batch(each.tolist()), num_micro_batches) for each in rows)
    up, down = zip(*((form.step(parts), form.answers(parts)) for parts in steps), strict=True)
    return sum(up) / count, sum(down) / count
