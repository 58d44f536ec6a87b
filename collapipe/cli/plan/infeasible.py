"""Why an inventory has no plan, in the terms of its file, and what would be enough."""

import numpy as np

from collapipe.errors import ConfigError
from collapipe.formatting import enough, micro_batches
from collapipe.inventory.file import Box, Cluster, Inventory
from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats, RoundProblem
from optim.radio.channel import Links, links, power_limits, uplink_rate, upload_energy


def no_room(
    problem: ClusterProblem, cluster: Cluster, block_bytes: float | None
) -> ConfigError | None:
    """The devices cannot hold the model at any m: which limit binds where. None: they can."""
    caps = block_caps(problem)
    row = int(caps.sum(axis=1).argmax())
    held, count = [int(cap) for cap in caps[row]], row + 1
    if sum(held) >= problem.num_blocks:
        return None
    binding = [
        f"{box.profile.name}: {cap} by {_limit(problem, box, cap, count, block_bytes)}"
        for box, cap in zip(cluster.boxes, held, strict=True)
    ]
    by_energy = any(map(_by_energy, cluster.boxes, held))
    cut = f" in {micro_batches(count)}" if by_energy else ""
    lower = f", or lower model.num_blocks to {sum(held)}" if any(held) else ""
    return cluster.section.fault(
        f"the devices hold at most {sum(held)} of {problem.num_blocks} blocks{cut} "
        f"({', '.join(binding)}); raise {_remedy(problem, cluster.boxes, held, count, block_bytes)}"
        f"{lower}"
    )


def _by_energy(box: Box, cap: int) -> bool:
    most = box.profile.max_blocks
    return box.profile.energy is not None and (most is None or cap < most)


def _by_bytes(box: Box, block_bytes: float | None) -> bool:
    """Rather than by a number of blocks."""
    if box.memory_bytes is None or not block_bytes:
        return False
    return box.profile.max_blocks == box.memory_bytes // block_bytes


def _limit(
    problem: ClusterProblem, box: Box, cap: int, count: int, block_bytes: float | None
) -> str:
    if _by_energy(box, cap):
        assert box.profile.energy is not None
        more = enough(_joules(problem, box, cap + 1, count))
        blocks = "1 block takes" if not cap else f"{cap + 1} blocks take"
        return f"energy_j {box.profile.energy.limit_j:g} where {blocks} {more} J"
    if _by_bytes(box, block_bytes):
        return f"memory_bytes {box.memory_bytes:g} at block_bytes {block_bytes:g}"
    return "max_blocks"


def _joules(problem: ClusterProblem, box: Box, blocks: int, count: int) -> float:
    """Of a batch."""
    assert box.profile.energy is not None
    return count * box.profile.energy.law.chunk(blocks, problem.batch_size / count)


def _remedy(
    problem: ClusterProblem,
    boxes: tuple[Box, ...],
    caps: list[int],
    count: int,
    block_bytes: float | None,
) -> str:
    """More energy, as far as memory lets it help, then memory."""
    raises, missing = [], problem.num_blocks - sum(caps)
    for box, cap in zip(boxes, caps, strict=True):
        room = problem.num_blocks if box.profile.max_blocks is None else box.profile.max_blocks
        more = min(room - cap, missing)
        if _by_energy(box, cap) and more > 0:
            joules = enough(_joules(problem, box, cap + more, count))
            raises.append(f"{box.profile.name}'s energy_j to {joules}")
            missing -= more
    full = [box for box, cap in zip(boxes, caps, strict=True) if not _by_energy(box, cap)] or boxes
    if missing:
        keys = [_key(box, block_bytes) for box in full if box.profile.max_blocks is not None]
        blocks = "1 block" if missing == 1 else f"{missing} blocks in all"
        raises.append(f"{' or '.join(keys)} by {blocks}")
    return " and ".join(raises)


def _key(box: Box, block_bytes: float | None) -> str:
    if _by_bytes(box, block_bytes):
        return f"{box.profile.name}'s memory_bytes ({block_bytes:g} a block)"
    return f"{box.profile.name}'s max_blocks"


def no_upload(inventory: Inventory, problem: RoundProblem, why: str) -> ConfigError:
    """Nobody's energy pays for an upload: who comes nearest, and what pays at full power."""
    pairs = links(problem.uplinks, problem.channels, problem.options.fading)
    if power_limits(pairs).any():
        return ConfigError(f"{inventory.file}: round: {why}")
    needed = full_power_energy(pairs)
    lacking = needed / pairs.energy_j
    unit, channel = (int(place) for place in np.unravel_index(lacking.argmin(), lacking.shape))
    cluster, uplink = inventory.clusters[unit], problem.uplinks[unit]
    return cluster.section.section("uplink").error(
        "energy_j",
        f"no cluster can afford its upload; nearest to it is {cluster.name} on channel {channel}: "
        f"{uplink.model_bits:.4g} bits at power_w={uplink.max_power_w:g} take "
        f"{enough(float(needed[unit, channel]))} J; give it these, or send fewer bits",
    )


def full_power_energy(pairs: Links) -> Floats:
    """Joules of each upload at the most power that its unit has, [N, J]."""
    rates = uplink_rate(
        pairs.max_power_w, pairs.gains, pairs.bandwidth_hz, pairs.noise_w, pairs.fading
    )
    return upload_energy(pairs.max_power_w, pairs.model_bits, rates)
