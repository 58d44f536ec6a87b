"""The state of its cluster that a unit reports: devices, rows, and the bits of its uploads."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from client_app.payloads import HeadChoice, payloads
from client_app.traffic import LinkTraffic
from collapipe.config import Settings
from collapipe.config.settings import check_members
from collapipe.devices.presets import ClusterPreset
from collapipe.errors import ConfigError
from collapipe.models.cost import head_flops, head_state_bits, measure_cost, upload_bits
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.seeds import derive
from collapipe.state import BlockCost, ClusterState, DeviceProfile, Uplink
from collapipe.tasks.task import Examples
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression import FLOAT32, sent_share


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """Draw the cluster's devices and uplink, which depend only on the run's seed and the unit."""
    cluster: ClusterPreset = settings.build("cluster")
    check_members("cluster", cluster, ClusterPreset)
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
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    twice = 1 + cost.forward_share
    if settings.may_recompute:
        smaller = block_cost(settings, recompute=True)
        drawn = cluster.draw(smaller, unit, _generator(settings, "cluster", unit))
        pairs = zip(devices, drawn, strict=True)
        devices = tuple(each.or_recomputing(twice, other) for each, other in pairs)
    sent = sent_share(settings.model.dim, settings.pipeline.wire_dtype)
    return tuple(each.taking(twice if settings.recomputes else 1.0, sent) for each in devices)


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

    def sent(precision: str, dtype: torch.dtype, with_head: bool) -> float:
        if not settings.privacy.secure_aggregation:
            return plain(precision, dtype, with_head)
        values = int(plain(FLOAT32, torch.float32, with_head)) // (8 * torch.float32.itemsize)
        most = 1.0, settings.federation.num_units  # the size does not depend on the bound
        how = settings.compression.upload, settings.privacy
        return 8.0 * Quantiser.of(*how, values, *most).num_bytes

    def state(dtype: torch.dtype) -> float:
        memory = settings.model, vocabulary, settings.optimizer, dtype
        return head_state_bits(*memory) if travels else 0.0

    preset = settings.channel.model_bits
    if preset is None:
        dtype = getattr(torch, settings.pipeline.dtype)
        return sent(precision, dtype, with_head) + state(dtype)
    whole = sent(precision, torch.float32, with_head) + state(torch.float32)
    return preset * whole / plain(FLOAT32, torch.float32, not settings.server_has_heads)


def _head_seconds(
    settings: Settings, vocabulary: Vocabulary, cluster: ClusterPreset, unit: int
) -> float:
    """Return the seconds of a head on the control unit in all local steps of a round, from its
    FLOPs relative to a block's."""
    cost = block_cost(settings)
    law = cluster.control_unit(cost, unit)
    if law is None and settings.chooses_heads:
        raise ConfigError(
            "decoder.mode=auto: the speed of the control unit is not known; set "
            "cluster.control_unit_… of the preset, or control_unit in the inventory, or choose "
            "decoder.mode=per_cluster or control_unit"
        )
    if law is None:
        return 0.0
    flops = head_flops(settings.model, vocabulary, settings.task.max_length)
    blocks = flops / cost.flops
    step_s = blocks * law.compute(1, settings.batch_size)
    return settings.federation.local_steps * step_s


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))
