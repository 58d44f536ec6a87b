"""What a unit reports of its cluster: devices, rows, and the bits that it will upload."""

import numpy as np
import torch

from client_app.payloads import payloads
from client_app.traffic import LinkTraffic
from collapipe.config import Settings
from collapipe.devices.presets import ClusterPreset
from collapipe.models.cost import measure_cost, upload_bits
from collapipe.seeds import derive
from collapipe.state import ClusterState, Uplink
from collapipe.tasks.task import Examples
from collapipe.text.tokenizer import Vocabulary
from collapipe.wire.compression import FLOAT32


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """The cluster as it is now: its devices and uplink are drawn, once and for the run."""
    cluster: ClusterPreset = settings.build("cluster")
    cost = measure_cost(
        settings.model, settings.task.max_length, settings.batch_size, settings.optimizer
    )
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    uplink = _uplink(settings, unit, examples, vocabulary)
    return ClusterState(unit, devices, len(examples.lengths), uplink)


def _uplink(settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary) -> Uplink:
    """With all payloads that the scheduler may choose from, else with the one that is set."""
    traffic = LinkTraffic.of(settings, unit, examples) if settings.server_has_heads else None
    offered = payloads(
        settings.compression,
        lambda precision: _model_bits(settings, vocabulary, precision),
        traffic.up_bits if traffic else None,
    )
    return settings.channel.draw_uplink(
        model_bits=offered[0].model_bits,
        activation_bits=offered[0].activation_bits,
        gradient_bits=traffic.down_bits if traffic else 0.0,
        num_samples=settings.federation.local_steps * settings.batch_size if traffic else 0,
        rng=_generator(settings, "uplink", unit),
        payloads=offered if settings.compression.decided else (),
    )


def _model_bits(settings: Settings, vocabulary: Vocabulary, precision: str) -> float:
    """θ_n^enc: what is really sent, or the preset's share of what float32 would be."""
    if not settings.framework.aggregate:  # it travels here to be evaluated, there never
        return 0.0

    def sent(precision: str, dtype: torch.dtype) -> float:
        with_head = not settings.server_has_heads
        return upload_bits(settings.model, vocabulary, precision, dtype, with_head)

    preset = settings.channel.model_bits
    if preset is None:
        return sent(precision, getattr(torch, settings.pipeline.dtype))
    return preset * sent(precision, torch.float32) / sent(FLOAT32, torch.float32)


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))
