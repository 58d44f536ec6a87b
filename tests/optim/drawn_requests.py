"""Random round requests with clusters and channels of the presets."""

import functools
from dataclasses import replace

import numpy as np

from collapipe import config
from collapipe.devices.presets import ChannelPreset, ClusterPreset
from collapipe.state import BlockCost, ClusterState, DeviceProfile, Estimates
from optim.planner import RoundRequest

# A block of BERT-base for samples of 64 tokens; eight ``edge`` devices can hold all 12 blocks.
COST = BlockCost(9.1e8, 1.8e9, 1.57e6, 1.57e6, 2.9e8)
BLOCKS = 12


@functools.cache
def presets(name: str) -> tuple[ClusterPreset, ChannelPreset]:
    """Return the cluster preset and the channel preset ``name``."""
    settings = config.load_overrides([f"cluster={name}", f"channel={name}"])
    return settings.build("cluster"), settings.build("channel")


def drawn_request(preset: str, seed: int, num_units: int = 6) -> RoundRequest:
    """Draw a request of units 10, 20, … from a preset.

    All devices of the last unit are absent; each other device is absent with probability 1/8.
    """
    rng, (cluster, channel) = np.random.default_rng(seed), presets(preset)
    channels = channel.draw(rng)
    states = []
    for n in range(num_units):
        devices = cluster.draw(COST, n, rng)
        there = (rng.random(len(devices)) > 1 / 8) & (n + 1 < num_units)
        devices = tuple(d if kept else away(d) for d, kept in zip(devices, there, strict=True))
        uplink = channel.draw_uplink(float(rng.uniform(1e6, 1e7)), float(rng.uniform(0, 1e8)), rng)
        states.append(ClusterState(10 * (n + 1), devices, int(rng.integers(10, 99)), uplink))
    return RoundRequest(
        round=seed + 1,
        clusters=tuple(states),
        num_blocks=BLOCKS,
        batch_size=64,
        local_steps=int(rng.integers(1, 4)),
        num_segments=None,
        num_micro_batches=int(rng.choice([8, 13, 24])),
        schedule="one_f_one_b",
        channels=channels,
        queues=tuple(rng.uniform(0, 20, num_units).tolist()),
        losses=(None, *rng.uniform(0, 5, num_units - 1).tolist()),
        learning_rate=float(rng.uniform(0, 1e-2)),
        estimates=Estimates(float(rng.uniform(0, 1)), None, float(rng.uniform(0, 1))),
    )


def with_later_stages(request: RoundRequest, seed: int) -> RoundRequest:
    """Draw times of a head on the server and of the downlink; each is 0 for some units."""
    rng, clusters = np.random.default_rng(seed), []
    for state in request.clusters:
        head, gradient = rng.uniform(0, 30, 2) * (rng.random(2) < 0.7)
        uplink = replace(state.uplink, head_s=float(head), gradient_s=float(gradient))
        clusters.append(replace(state, uplink=uplink))
    return replace(request, clusters=tuple(clusters))


def away(device: DeviceProfile) -> DeviceProfile:
    """Return the device as a request describes an absent one."""
    return replace(device, max_blocks=0)
