"""What a unit reports of its cluster: devices, rows, and the bits that it will upload."""

from dataclasses import replace

import numpy as np
import torch

from client_app.traffic import LinkFormat, expected_step, round_of
from collapipe.config import Settings
from collapipe.devices.presets import ChannelPreset, ClusterPreset
from collapipe.models.cost import measure_cost, upload_bits
from collapipe.models.cut import extra_rows
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tasks.task import Examples
from collapipe.text.tokenizer import Vocabulary


def cluster_state(
    settings: Settings, unit: int, examples: Examples, vocabulary: Vocabulary
) -> ClusterState:
    """The cluster as it is now: its devices and uplink are drawn, once and for the run."""
    spec, rows = settings.model, len(examples.lengths)
    cluster: ClusterPreset = settings.build("cluster")
    channel: ChannelPreset = settings.build("channel")
    cost = measure_cost(spec, settings.task.max_length, settings.batch_size, settings.optimizer)
    linked, precision = settings.server_has_heads, settings.compression.upload
    dtype = getattr(torch, settings.pipeline.dtype)
    uplink = channel.draw_uplink(
        model_bits=upload_bits(spec, vocabulary, precision, dtype, with_head=not linked),
        activation_bits=_activation_bits(settings, channel, unit, examples) if linked else 0.0,
        rng=_generator(settings, "uplink", unit),
    )
    if not settings.framework.aggregate:  # its weights travel here to be evaluated, there never
        uplink = replace(uplink, model_bits=0.0)
    devices = cluster.draw(cost, unit, _generator(settings, "cluster", unit))
    return ClusterState(unit, devices, rows, uplink)


def _activation_bits(
    settings: Settings, channel: ChannelPreset, unit: int, examples: Examples
) -> float:
    """z_n^enc of a round: the preset's, or the frames that the link is expected to carry."""
    steps = settings.federation.local_steps
    if channel.activation_bits is not None:
        return steps * channel.activation_bits
    spec, dtype = settings.model, getattr(torch, settings.pipeline.dtype)
    precision, rows = settings.compression.activation, extra_rows(spec)
    form = LinkFormat(spec.num_blocks + 1, spec.dim, dtype, precision, rows)
    seed, num_micro_batches = (
        derive(settings.seed, "data", unit),
        settings.pipeline.num_micro_batches,
    )
    step = expected_step(form, examples, settings.batch_size, num_micro_batches, seed)
    return 8 * round_of([step] * steps).bytes_up


def _generator(settings: Settings, purpose: str, unit: int) -> np.random.Generator:
    return np.random.default_rng(derive(settings.seed, purpose, unit))
