"""Devices and channels of the presets ``paper``, and verified solutions for them."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collapipe import config
from collapipe.devices.presets import ChannelPreset, PaperCluster
from collapipe.errors import InfeasibleRoundError
from collapipe.seeds import derive
from collapipe.state import BlockCost, Channel, DeviceProfile, Uplink
from optim.problem import ClusterProblem, ClusterSolution
from optim.solvers import cluster_solver
from optim.verify import verify_cluster

BATCH_SIZE = 64  # b of Table II
TRANSFORMER_BLOCKS, BERT_BLOCKS = 6, 12  # L


@dataclass(frozen=True)
class PaperPresets:
    """The presets, and the options from which they were made."""

    cluster: PaperCluster
    channel: ChannelPreset
    options: Mapping[str, Any]

    def devices(self, seed: int, *purpose: int | str) -> tuple[DeviceProfile, ...]:
        """Draw the devices of one cluster; the same seed and purpose give the same ones."""
        cost = BlockCost(0.0, 0.0, 0.0, 0.0, 0.0)  # Table II has times and memory
        return self.cluster.draw(cost, 0, stream(seed, "cluster", *purpose))

    def radio(
        self, seed: int, num_units: int, *purpose: int | str
    ) -> tuple[tuple[Channel, ...], tuple[Uplink, ...]]:
        """Draw the channels, and the uplinks of ``num_units`` units with a batch's activations."""
        rng = stream(seed, "radio", *purpose)
        bits = BATCH_SIZE * self.cluster.hop_bits / 2  # half of a hop's bits in both directions
        channels, sent = self.channel.draw(rng), (self.channel.model_bits or 0.0, bits)
        return channels, tuple(self.channel.draw_uplink(*sent, rng) for _ in range(num_units))


@functools.cache
def paper_presets() -> PaperPresets:
    """Return the presets ``paper`` of clusters and channels."""
    settings = config.load_overrides(["cluster=paper", "channel=paper"])
    options = {name: settings.tree[name] for name in ("cluster", "channel")}
    return PaperPresets(settings.build("cluster"), settings.build("channel"), options)


@functools.cache
def narrowed(spread: float) -> PaperPresets:
    """Return the presets with the devices' ranges shrunk around their middles.

    ``spread`` is the remaining fraction of the width: 0 makes all devices equal, 1 changes nothing.
    """
    presets, ranges = paper_presets(), dict[str, Any]()
    for name in ("relative_speed", "flops_per_s", "d2d_power_w"):
        low, high = getattr(presets.cluster, name)
        middle = (1 - spread) * (low + high) / 2
        ranges[name] = spread * low + middle, spread * high + middle
    return replace(presets, cluster=replace(presets.cluster, **ranges))


def stream(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a generator for one purpose of one seed."""
    return np.random.default_rng(derive(seed, *purpose))


def draw_cluster(
    num_blocks: int, seed: int, *purpose: int | str, spread: float = 1.0
) -> ClusterProblem:
    """Return Sub-1 of a drawn cluster with eq. (15) and m up to b; see ``narrowed``."""
    devices = narrowed(spread).devices(seed, *purpose)
    return ClusterProblem(devices, num_blocks, BATCH_SIZE, BATCH_SIZE, "bound")


def settings(num_blocks: int, **more: int) -> dict[str, str | int]:
    """Return the settings to record with a figure of such clusters."""
    return {"num_blocks": num_blocks, "batch_size": BATCH_SIZE, **more, "latency": "bound"}


def solve(
    solver: str, cluster: ClusterProblem, rng: np.random.Generator, unlimited: bool = False
) -> tuple[ClusterSolution, bool]:
    """Return a verified solution, and whether it exceeds a limit of memory or energy.

    ``unlimited`` removes the limits for systems that ignore them, so that their times can be
    compared. Raises ``InfeasibleRoundError`` if no solution exists.
    """
    try:
        solution = cluster_solver(solver)(cluster, rng)
    except InfeasibleRoundError:
        if not unlimited:
            raise
        devices = (replace(device, max_blocks=None, energy=None) for device in cluster.devices)
        cluster = replace(cluster, devices=tuple(devices))
        return solve(solver, cluster, rng)[0], True
    verify_cluster(solution, cluster)
    return solution, False
