"""The state of its cluster that a unit reports: devices, rows, and the bits of its uploads.

Traffic on the decoder link is predicted exactly to the byte.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
import torch

from client_app.payloads import HeadChoice, payloads
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.devices.presets import ClusterPreset
from collapipe.errors import ConfigError
from collapipe.models.cost import head_flops, head_state_bits, measure_cost, upload_bits
from collapipe.models.sent_rows import RowsRead
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.seeds import derive
from collapipe.state import BlockCost, ClusterState, DeviceProfile, Uplink
from collapipe.tasks.task import Examples
from collapipe.tensors import Batch
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import returned
from collapipe.wire import frames
from collapipe.wire.compression.codec import FLOAT32, layout, sent_share
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
        """Return z_n^enc, the bits that are sent with activations in this precision."""
        return self._bits(precision, (self.form.step(each, precision) for each in self.steps))

    @property
    def down_bits(self) -> float:
        """The bits of the received gradients."""
        return self._bits(self.form.gradient, map(self.form.answers, self.steps))

    def _bits(self, precision: str, step_bytes: Iterable[int]) -> float:
        """Return a round's bits: the frames' bits, or the preset's scaled bits."""
        if self.preset_bits is not None:
            return self.local_steps * self.preset_bits * sent_share(self.form.dim, precision)
        return 8 * self.local_steps * fmean(step_bytes)


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """Draw the cluster's devices and uplink, which depend only on the run's seed and the unit."""
    cluster: ClusterPreset = settings.build("cluster")
    devices = described(settings, cluster, unit)
    uplink = _uplink(settings, unit, examples, vocabulary)
    if settings.units_have_heads and not settings.framework.unsplit:
        head_s = _head_seconds(settings, vocabulary, cluster, unit)
        if settings.chooses_heads:
            uplink = replace(uplink, control_unit_head_s=head_s)
        else:
            uplink = replace(uplink, head_s=head_s)
    return ClusterState(unit, devices, len(examples.lengths), uplink)


def described(settings: Settings, cluster: ClusterPreset, unit: int) -> tuple[DeviceProfile, ...]:
    """Return the unit's devices as the ``cluster`` describes them, with the run's model."""
    cost = block_cost(settings)
    devices = _drawn(settings, cluster, cost, unit)
    twice = 1 + cost.forward_share
    if settings.may_recompute:
        smaller = block_cost(settings, recompute=True)
        pairs = zip(devices, _drawn(settings, cluster, smaller, unit), strict=True)
        devices = tuple(each.or_recomputing(twice, other) for each, other in pairs)
    sent = sent_share(settings.model.dim, settings.pipeline.wire_dtype)
    return tuple(each.taking(twice if settings.recomputes else 1.0, sent) for each in devices)


def _drawn(
    settings: Settings, cluster: ClusterPreset, cost: BlockCost, unit: int
) -> tuple[DeviceProfile, ...]:
    drawn = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    method = f"cluster: {type(cluster).__qualname__}.draw"
    return tuple(returned(each, DeviceProfile, method) for each in returned(drawn, tuple, method))


def block_cost(settings: Settings, recompute: bool = False) -> BlockCost:
    """Return the compute, memory and traffic of a block, for a device that recomputes if all do or
    with ``recompute``."""
    sizes = settings.task.max_length, settings.batch_size
    recomputes = recompute or settings.recomputes
    return measure_cost(settings.model, *sizes, settings.optimizer, recomputes)


def _uplink(settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary) -> Uplink:
    """Draw the unit's uplink. It offers all payloads if the scheduler chooses, else it has the
    configured one."""
    traffic = LinkTraffic.of(settings, unit, examples) if settings.server_has_heads else None
    offered = payloads(settings.compression, tuple(_heads(settings, vocabulary, traffic)))
    return settings.channel.draw_uplink(
        model_bits=offered[0].model_bits,
        activation_bits=offered[0].activation_bits,
        gradient_bits=traffic.down_bits if traffic else 0.0,
        num_samples=settings.federation.local_steps * settings.batch_size if traffic else 0,
        rng=_generator(settings, "uplink", unit),
        payloads=offered if settings.chooses_payloads else (),
        unit=unit,
    )


def _heads(
    settings: Settings, vocabulary: Vocabulary, traffic: LinkTraffic | None
) -> Iterator[HeadChoice]:
    """Yield the unit's payloads for each allowed place of its head."""
    chosen = settings.chooses_heads
    model_bits = partial(_model_bits, settings, vocabulary)
    if traffic:
        on_server = partial(model_bits, with_head=False)
        yield HeadChoice("server" if chosen else None, on_server, traffic.up_bits)
    if settings.units_have_heads:
        on_unit = partial(model_bits, with_head=True)
        yield HeadChoice("control_unit" if chosen else None, on_unit, None)


def _model_bits(
    settings: Settings, vocabulary: Vocabulary, precision: str, with_head: bool
) -> float:
    """Return θ_n^enc, the bits of the upload: the real size, or the preset's size scaled by the
    upload's share of a float32 upload.

    If the scheduler chooses a head's place, the upload includes the head's optimiser state. The
    preset then describes a unit with its head on the server.
    """
    if not settings.framework.aggregate:  # models are sent only for evaluation
        return 0.0
    travels = with_head and settings.chooses_heads and settings.optimizer.state == "keep"
    plain = partial(upload_bits, settings.model, vocabulary)

    def sent(dtype: torch.dtype) -> float:
        if settings.privacy.secure_aggregation:
            values = int(plain(FLOAT32, torch.float32, with_head)) // (8 * torch.float32.itemsize)
            most = 1.0, settings.federation.num_units  # the size does not depend on the bound
            how = settings.compression.upload, settings.privacy
            bits = 8.0 * Quantiser.of(*how, values, *most).num_bytes
        else:
            bits = plain(precision, dtype, with_head)
        memory = settings.model, vocabulary, settings.optimizer, dtype
        return bits + head_state_bits(*memory) if travels else bits

    preset = settings.channel.model_bits
    if preset is None:
        return sent(getattr(torch, settings.pipeline.dtype))
    whole = plain(FLOAT32, torch.float32, not settings.server_has_heads)
    return preset * sent(torch.float32) / whole


def _head_seconds(
    settings: Settings, vocabulary: Vocabulary, cluster: ClusterPreset, unit: int
) -> float:
    """Return the seconds of a head on the control unit in all local steps of a round, from its
    FLOPs relative to a block's."""
    cost = block_cost(settings)
    if (law := cluster.control_unit(cost, unit)) is None:
        if not settings.chooses_heads:
            return 0.0
        raise ConfigError(
            "decoder.mode=auto: the speed of the control unit is not known; set "
            "cluster.control_unit_… of the preset, or control_unit in the inventory, or choose "
            "decoder.mode=per_cluster or control_unit"
        )
    blocks = head_flops(settings.model, vocabulary, settings.task.max_length) / cost.flops
    step_s = blocks * law.compute(1, settings.batch_size)
    return settings.federation.local_steps * step_s


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))
