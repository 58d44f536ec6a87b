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
from collapipe.models.cut import extra_rows
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
    uplink = settings.channel.draw_uplink(
        model_bits=upload_bits(spec, vocabulary, precision, dtype, with_head=not linked),
        activation_bits=_activation_bits(settings, unit, examples) if linked else 0.0,
        rng=_generator(settings, "uplink", unit),
    )
    if not settings.framework.aggregate:  # its weights travel here to be evaluated, there never
        uplink = replace(uplink, model_bits=0.0)
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    return ClusterState(unit, devices, rows, uplink)


def _activation_bits(settings: Settings, unit: int, examples: Examples) -> float:
    """z_n^enc of a round: the preset's, or the frames that the link is expected to carry."""
    steps, preset = settings.federation.local_steps, settings.channel.activation_bits
    if preset is not None:
        return steps * preset
    spec, dtype = settings.model, getattr(torch, settings.pipeline.dtype)
    precision, rows = settings.compression.activation, extra_rows(spec)
    form = LinkFormat(spec.num_blocks + 1, spec.dim, dtype, precision, rows)
    seed, parts = derive(settings.seed, "data", unit), settings.pipeline.num_micro_batches
    step = expected_step(form, examples, settings.batch_size, parts, seed)
    return 8 * sum([*[step] * steps, BYE])


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))


@dataclass(frozen=True, slots=True)
class LinkFormat:
    """What the size of the frames that a unit sends depends on, apart from its batches."""

    num_parts: int  # embedding and blocks, L + 1: each has a gradient norm
    dim: int
    dtype: torch.dtype  # in which the model computes
    precision: str  # compression.activation
    extra_rows: int = 0  # of an activation behind those of the tokens, see models.cut.extra_rows

    def step(self, micro_batches: Sequence[Batch]) -> int:
        """Bytes of a step's frames: a begin, an activation for each micro-batch, the norms."""
        size = frames.num_bytes([(torch.int64, (2,))])
        size += frames.num_bytes([(torch.float64, (self.num_parts,))])
        for part in micro_batches:
            samples, tokens = part.mask.shape
            shape = (samples, tokens + self.extra_rows, self.dim)
            others = [(torch.bool, (samples, tokens)), (torch.int64, tuple(part.targets.shape))]
            size += frames.num_bytes([*layout(shape, self.dtype, self.precision), *others])
        return size


def expected_step(
    form: LinkFormat, examples: Examples, batch_size: int, num_micro_batches: int, seed: int
) -> float:
    """Mean of the steps on a first epoch's batches, at most ``_SAMPLED`` of them, evenly spaced;
    ``seed`` is that of the unit's data."""
    lengths = examples.lengths
    epoch = len(lengths) // min(batch_size, len(lengths))
    count = min(epoch, _SAMPLED)
    rows = [batch_rows(lengths, batch_size, i * epoch // count, seed) for i in range(count)]
    batches = (examples.batch(each.tolist()) for each in rows)
    return sum(form.step(split(batch, num_micro_batches)) for batch in batches) / count
