"""What a unit reports of its cluster: devices, rows, and the bits that it will upload."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from client_app.payloads import HeadChoice, payloads
from client_app.traffic import LinkTraffic
from collapipe.config import Settings
from collapipe.devices.presets import ClusterPreset
from collapipe.errors import ConfigError
from collapipe.models.cost import head_flops, head_state_bits, measure_cost, upload_bits
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.seeds import derive
from collapipe.state import AffineLaw, BlockCost, ClusterState, Uplink
from collapipe.tasks.task import Examples
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression import FLOAT32, sent_share
from pipeline.schedule import splits_backward


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """The cluster as it is now: its devices and uplink are drawn, once and for the run."""
    cluster: ClusterPreset = settings.build("cluster")
    cost = block_cost(settings)
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    times = 1 + cost.forward_share if settings.recomputes else 1.0
    sent = sent_share(settings.model.dim, settings.pipeline.wire_dtype)
    devices = tuple(each.taking(times, sent) for each in devices)
    uplink = _uplink(settings, unit, examples, vocabulary)
    if settings.units_have_heads and not settings.framework.unsplit:
        head_s = _head_seconds(settings, vocabulary, cluster, cost, unit)
        if settings.chooses_heads:
            uplink = replace(uplink, control_unit_head_s=head_s)
        else:
            uplink = replace(uplink, head_s=head_s)
    return ClusterState(unit, devices, len(examples.lengths), uplink)


def block_cost(settings: Settings) -> BlockCost:
    """What a block of the run's model asks of a device under the run's schedule."""
    sizes = settings.task.max_length, settings.batch_size
    split = splits_backward(settings.pipeline.schedule) and not settings.framework.unsplit
    return measure_cost(settings.model, *sizes, settings.optimizer, settings.recomputes, split)


def _uplink(settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary) -> Uplink:
    """With all payloads that the scheduler may choose from, else with the one that is set."""
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
    """What the unit sends with its head on the server, and on the unit itself."""
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
    """θ_n^enc: what is really sent, or the preset's share of what float32 would be.

    A head whose place is chosen takes its optimiser's memory along. A preset's figure is then that
    of a unit whose head is on the server.
    """
    if not settings.framework.aggregate:  # it travels here to be evaluated, there never
        return 0.0
    travels = with_head and settings.chooses_heads and settings.optimizer.state == "keep"

    plain = partial(upload_bits, settings.model, vocabulary)

    def sent(precision: str, dtype: torch.dtype, with_head: bool) -> float:
        if not settings.privacy.secure_aggregation:
            return plain(precision, dtype, with_head)
        values = int(plain(FLOAT32, torch.float32, with_head)) // (8 * torch.float32.itemsize)
        most = 1.0, settings.federation.num_units  # any bound has as many bits
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
    settings: Settings,
    vocabulary: Vocabulary,
    cluster: ClusterPreset,
    cost: BlockCost,
    unit: int,
) -> float:
    """Of all local steps of a round in a head on the control unit, by its FLOPs in blocks."""
    told = getattr(cluster, "control_unit", None)  # which older plug-ins lack
    law: AffineLaw | None = told(cost, unit) if told else None
    if law is None and settings.chooses_heads:
        raise ConfigError(
            "decoder.mode=auto: the speed of the control unit is not known; set "
            "cluster.control_unit_… of the preset, or control_unit in the inventory, or choose "
            "decoder.mode=per_cluster or control_unit"
        )
    if law is None:
        return 0.0
    flops = head_flops(settings.model, vocabulary, settings.task.max_length)
    blocks = flops / (cost.forward_flops + cost.backward_flops)
    step_s = blocks * law.compute(1, settings.batch_size)
    return settings.federation.local_steps * step_s


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))
