"""Small random clusters whose devices may share stages."""

import dataclasses
import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from collapipe.state import (
    AffineLaw,
    DeviceProfile,
    EnergyBudget,
    EnergyScope,
    Link,
    MemoryBudget,
    SharingLaw,
)
from optim.problem import LATENCIES, ClusterProblem


def drawn(rng: np.random.Generator, most_devices: int = 4, most_blocks: int = 5) -> ClusterProblem:
    """Draw any law and uplink; some devices are alike, and memory and energy are often scarce."""
    count, num_blocks = (int(rng.integers(1, most + 1)) for most in (most_devices, most_blocks))
    batch, seeds = int(rng.integers(1, 8)), rng.integers(0, 2**30, count)
    kinds = rng.integers(0, 3, count) if rng.random() < 0.4 else np.arange(count)
    devices = tuple(
        _device(f"device-{k}", np.random.default_rng(seeds[kinds[k] % count]), num_blocks, batch)
        for k in range(count)
    )
    head_s, gradient_s = rng.random(2) * (rng.random(2) < (0.4, 0.2))
    finite = (0.0, *sorted(rng.uniform(0, 10, 3).tolist()))
    uplinks: list[tuple[float, ...]] = [(0.0,), finite, (0.0, math.inf)]
    return ClusterProblem(
        devices,
        num_blocks,
        batch,
        int(rng.integers(1, batch + 1)),
        LATENCIES[rng.integers(3)],
        uplinks[rng.integers(3)],
        float(head_s),
        float(gradient_s),
        in_flight=() if rng.random() < 0.5 else (int(rng.integers(1, count + 2)),),
    )


def tight(rng: np.random.Generator) -> ClusterProblem:
    """Draw devices with memory for a few blocks; some may recompute.

    Near the end of the pipeline devices keep the tensors of fewer micro-batches.
    """
    problem = drawn(rng, most_devices=3)
    batch, kept = int(rng.integers(4, 8)), tuple(range(1, len(problem.devices) + 1))
    devices = tuple(_tight(device, rng, batch, problem.num_blocks) for device in problem.devices)
    most = min(problem.max_micro_batches + 2, batch)
    return replace(
        problem, devices=devices, batch_size=batch, max_micro_batches=most, in_flight=kept
    )


def _tight(
    device: DeviceProfile, rng: np.random.Generator, batch: int, num_blocks: int
) -> DeviceProfile:
    of_batch, inputs = float(rng.uniform(1, 4)), float(rng.uniform(0, 1))
    room = 0.4 + float(rng.uniform(0.4, 1) * num_blocks * (1 + of_batch / 3))
    of_row, left = rng.uniform(0, 0.1), rng.uniform(0, 0.3)  # parts of ``of_batch``
    memory = MemoryBudget(room, 0.0, 1 + of_batch, of_row * of_batch, 0.0, of_batch, 0.2)
    kept, each = left * of_batch, float(rng.uniform(0.5, 1)) * of_batch / batch
    smaller = MemoryBudget(room, inputs, 1.0 + kept, each, inputs, kept, 0.2)
    sharing = device.sharing and replace(device.sharing, max_blocks=None, memory=memory)
    device = replace(device, max_blocks=None, memory=memory, sharing=sharing)
    may = rng.random() < 0.6
    return device.or_recomputing(4 / 3, replace(device, memory=smaller)) if may else device


def _device(name: str, rng: np.random.Generator, num_blocks: int, batch: int) -> DeviceProfile:
    def some(most: float) -> float:
        return float(rng.uniform(0, most) * (rng.random() < 0.7))

    time = AffineLaw(float(rng.uniform(0.05, 1)), some(1), some(0.5), some(0.6))
    memory, limit, energy = None, None, None
    if rng.random() < 0.6:
        own, of_batch, segment = rng.uniform(1, 2), rng.uniform(0, 2), some(1)
        room = float(rng.uniform(0.5, 2.5) * num_blocks)
        sizes = segment, float(own + of_batch), some(0.5), segment * rng.random(), float(of_batch)
        memory = MemoryBudget(room, *sizes, some(0.5))
    if rng.random() < 0.2:
        limit = int(rng.integers(0, num_blocks + 1))
    if rng.random() < 0.3:
        joules = float(rng.uniform(0.25, 1) * num_blocks * batch)
        sync_j = float(rng.spawn(1)[0].choice([0.0, 0.3, 3.0]))
        scope: EnergyScope = "batch" if rng.random() < 0.5 else "micro_batch"
        energy = EnergyBudget(joules, time, scope, sync_j=sync_j)
    sharing = None if rng.random() < 0.1 else SharingLaw(some(0.3), limit, memory)
    return DeviceProfile(name, time, limit, energy, memory, sharing)


def linked(problem: ClusterProblem, rng: np.random.Generator) -> ClusterProblem:
    """Return the problem with links between some pairs of devices: slow, fast or without any
    time."""
    devices, syncs = list(problem.devices), rng.spawn(1)[0]
    for pair in combinations(range(len(devices)), 2):
        if rng.random() < 0.6:
            w, ell = (float(rng.choice([0.0, 0.05, most])) for most in (1.0, 1.5))
            sync_s = float(syncs.choice([0.0, 0.05, 1.0])) if syncs.random() < 0.8 else None
            for k, other in (pair, pair[::-1]):
                link = Link(devices[other].name, w, ell, sync_s)
                devices[k] = replace(devices[k], links=(*devices[k].links, link))
    return replace(problem, devices=tuple(devices))


def budgeted(problem: ClusterProblem, rng: np.random.Generator) -> ClusterProblem:
    """Return the problem with scarce energy budgets, whose links take other joules than usual
    hops."""
    devices = []
    for each in problem.devices:
        watts, sending = rng.uniform(0.5, 2), rng.choice([0.0, 0.3, 3.0], len(each.links))
        parts = (float(watts * part) for part in dataclasses.astuple(each.time))
        pairs = zip(each.links, sending.tolist(), strict=True)
        links = tuple(Link(link.to, watts * link.w, watts * link.ell) for link, watts in pairs)
        whole = each.time.chunk(problem.num_blocks, problem.batch_size)
        scope: EnergyScope = "batch" if rng.random() < 0.7 else "micro_batch"
        limit_j = float(rng.uniform(0.2, 2) * watts * whole)
        sync_j = float(rng.spawn(1)[0].choice([0.0, 1.0]))
        energy = EnergyBudget(limit_j, AffineLaw(*parts), scope, links, sync_j)
        devices.append(replace(each, energy=energy if rng.random() < 0.8 else None))
    return replace(problem, devices=tuple(devices))


def timeless(problem: ClusterProblem, rng: np.random.Generator) -> ClusterProblem:
    """Return the problem in which some parts of devices' laws are 0, or all parts of all
    devices."""
    none = rng.random() < 0.5
    devices = []
    for each in problem.devices:
        law, kept = each.time, rng.random(4) < (0.0 if none else 0.5)
        parts = np.where(kept, (law.u, law.v, law.w, law.ell), 0.0).tolist()
        sharing = each.sharing and replace(each.sharing, sync_s=0.0)
        devices.append(replace(each, time=AffineLaw(*parts), sharing=sharing))
    return replace(problem, devices=tuple(devices), head_s=0.0, gradient_s=0.0)


def lopsided(rng: np.random.Generator) -> ClusterProblem:
    """Draw many rows under ``overlap`` on two or three devices.

    Some devices compute longer and others send longer, so that rows with the least time may not
    have the least pace.
    """
    problem, count = drawn(rng, most_blocks=4), int(rng.integers(2, 4))
    batch, blocks = int(rng.integers(12, 33)), problem.num_blocks
    devices = []
    for k in range(count):
        u, v, w, ell = rng.random(4) / (blocks, blocks, 1, 1)
        law = AffineLaw(float(u), float(v), float(w), float(ell))
        memory, energy = None, None
        if rng.random() < 0.3:
            room, of_batch = rng.uniform((0.4, 0.3), (1.3 * blocks, 0.9)).tolist()
            memory = MemoryBudget(room, 0.0, 1.0, 0.0, 0.0, of_batch, 0.05)
        if rng.random() < 0.2:
            energy = EnergyBudget(law.chunk(blocks, batch) * float(rng.uniform(0.3, 1.5)), law)
        sharing = SharingLaw(float(rng.uniform(0, 0.2) * rng.integers(0, 2)), None, memory)
        devices.append(DeviceProfile(f"device-{k}", law, None, energy, memory, sharing))
    if rng.random() < 0.4:
        devices[-1] = replace(devices[0], name=devices[-1].name)
    most = int(rng.integers(1, 9))
    return replace(
        problem,
        devices=tuple(devices),
        batch_size=batch,
        max_micro_batches=most,
        latency="overlap",
        in_flight=problem.in_flight and (int(rng.integers(1, count + 1)),),
    )


def slow_to_start(rng: np.random.Generator) -> ClusterProblem:
    """Draw devices that take long per micro-batch and little per row; syncs are about as long as a
    block.

    Some m are not allowed.
    """
    problem, batch = drawn(rng, most_devices=4), int(rng.integers(4, 10))
    devices = []
    for each in problem.devices:
        u, v = rng.random(2) * (0.05 * (rng.random() < 0.5), 1.5)
        time = AffineLaw(float(u), float(v), 0.0, float(rng.random() < 0.3))
        sharing = SharingLaw(float(rng.random() * 1.2))
        devices.append(DeviceProfile(each.name, time, sharing=sharing))
    least, most = sorted(rng.integers(1, batch + 1, 2).tolist())
    return replace(
        problem,
        devices=tuple(devices),
        batch_size=batch,
        min_micro_batches=least,
        max_micro_batches=most,
        in_flight=(),
    )
