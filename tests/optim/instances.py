"""Random clusters for tests and benchmarks of solvers."""

from typing import Literal

import numpy as np

from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget
from optim.problem import ClusterProblem, Latency


def heterogeneous(
    rng: np.random.Generator,
    num_devices: int,
    num_blocks: int,
    latency: Latency,
    max_micro_batches: int = 64,
) -> ClusterProblem:
    """Draw devices with speeds that differ by up to a factor of 8; hops are about as long as a
    block.

    About a third of them hold few blocks, and about a sixth have an energy budget.
    """
    batch = 64
    block_s = 0.05 * 8 ** rng.random(num_devices)  # u: one sample through one block
    devices = []
    for k, u in enumerate(block_s):
        v, w, ell = u * rng.uniform(0, 4), 0.05 * rng.uniform(0.5, 4), rng.uniform(0, 0.4)
        few = max(1, round(num_blocks / num_devices * rng.uniform(1, 4)))
        limit = few if rng.random() < 1 / 3 else None
        energy = _budget(rng, num_blocks, batch) if rng.random() < 1 / 6 else None
        law = AffineLaw(float(u), float(v), float(w), float(ell))
        devices.append(DeviceProfile(f"device-{k}", law, limit, energy))
    return ClusterProblem(tuple(devices), num_blocks, batch, max_micro_batches, latency)


def uneven(
    rng: np.random.Generator, latency: Latency, num_devices: int = 6, num_blocks: int = 12
) -> ClusterProblem:
    """Draw devices without caps; speeds differ by up to a factor of 8, hops by up to 300."""
    devices = []
    for k, u in enumerate(0.05 * 8 ** rng.random(num_devices)):
        hop = 0.02 * 300 ** rng.random()
        law = AffineLaw(float(u), float(u * rng.uniform(0, 2)), float(hop * rng.random()), 5 * hop)
        devices.append(DeviceProfile(f"device-{k}", law))
    return ClusterProblem(tuple(devices), num_blocks, 64, 64, latency)


def paper_like(
    rng: np.random.Generator, latency: Latency, num_devices: int = 6, num_blocks: int = 12
) -> ClusterProblem:
    """Draw Table II's times: 2·10⁶ FLOP per sample, block and direction; at most 6 blocks.

    The speed is φ·f with φ ∈ [10, 24] MFLOP/s and f ∈ [0.1, 0.8]. All hops take equally long.
    """
    speed = 1e6 * rng.uniform(10, 24, num_devices) * rng.uniform(0.1, 0.8, num_devices)
    laws = [AffineLaw(float(2e6 / each), float(2e6 / each), 0.0, 0.05) for each in speed]
    devices = tuple(DeviceProfile(f"device-{k}", law, 6) for k, law in enumerate(laws))
    return ClusterProblem(devices, num_blocks, 64, 64, latency)


def _budget(rng: np.random.Generator, num_blocks: int, batch: int) -> EnergyBudget:
    """Draw a limit of 0.3 to 1.5 times the joules of all blocks with one micro-batch."""
    u, v, w, ell = (float(part) for part in rng.uniform(0, 1, 4) * (0.01, 0.05, 0.01, 0.05))
    law = AffineLaw(u, v, w, ell)
    scope: Literal["batch", "micro_batch"] = "batch" if rng.random() < 0.5 else "micro_batch"
    whole = law.chunk(num_blocks, batch)
    return EnergyBudget(whole * float(rng.uniform(0.3, 1.5)), law, scope)
