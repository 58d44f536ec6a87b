"""Why an inventory has no plan, in the terms of its file, and what would be enough."""

import numpy as np

from collapipe.devices.hardware import PhysicalDevice
from collapipe.errors import ConfigError
from collapipe.formatting import enough, micro_batches
from collapipe.inventory.file import Cluster, Inventory
from collapipe.state import DeviceProfile
from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats, RoundProblem
from optim.radio.channel import Links, links, power_limits, uplink_rate, upload_energy


def no_room(problem: ClusterProblem, cluster: Cluster, block_bytes: float | None) -> str | None:
    """Which limit binds where, if the devices cannot hold the model at any m. None: they can."""
    caps = block_caps(problem)
    row = int(caps.sum(axis=1).argmax())
    held, count = [int(cap) for cap in caps[row]], row + 1
    if sum(held) >= problem.num_blocks:
        return None
    room = [
        _Room(device, profile, cap, problem.batch_size, count, block_bytes)
        for device, profile, cap in zip(cluster.devices, cluster.profiles, held, strict=True)
    ]
    pieces = f" in {micro_batches(count)}" if any(each.by_energy for each in room) else ""
    lower = f", or lower model.num_blocks to {sum(held)}" if any(held) else ""
    return (
        f"the devices hold at most {sum(held)} of {problem.num_blocks} blocks{pieces} "
        f"({', '.join(each.binding() for each in room)}); "
        f"raise {_remedy(room, problem.num_blocks)}{lower}"
    )


class _Room:
    """A device that holds ``cap`` blocks of a batch in ``count`` micro-batches, and why no more."""

    def __init__(
        self,
        device: PhysicalDevice,
        profile: DeviceProfile,
        cap: int,
        batch_size: int,
        count: int,
        block_bytes: float | None,
    ) -> None:
        self.name, self.cap, self.most = profile.name, cap, profile.max_blocks
        self._energy, self._device, self._block_bytes = profile.energy, device, block_bytes
        self._count, self._size = count, batch_size / count
        self.by_energy = self._energy is not None and (self.most is None or cap < self.most)
        self._by_bytes = device.is_limited_by_memory(block_bytes)

    def binding(self) -> str:
        """The limit that binds, with its figures."""
        limit = "max_blocks"
        if self.by_energy:
            assert self._energy is not None
            blocks = "1 block takes" if not self.cap else f"{self.cap + 1} blocks take"
            joules = self.joules(self.cap + 1)
            limit = f"energy_j {self._energy.limit_j:g} where {blocks} {joules} J"
        elif self._by_bytes:
            limit = (
                f"memory_bytes {self._device.memory_bytes:g} at block_bytes {self._block_bytes:g}"
            )
        return f"{self.name}: {self.cap} by {limit}"

    def joules(self, blocks: int) -> str:
        """Of a batch, rounded up."""
        assert self._energy is not None
        return enough(self._count * self._energy.law.chunk(blocks, self._size))

    def key(self) -> str:
        """The key that limits blocks whatever the energy."""
        if self._by_bytes:
            return f"{self.name}'s memory_bytes ({self._block_bytes:g} a block)"
        return f"{self.name}'s max_blocks"


def _remedy(room: list[_Room], num_blocks: int) -> str:
    """More energy, as far as memory lets it help, then memory."""
    raises, missing = [], num_blocks - sum(each.cap for each in room)
    for each in room:
        more = min((num_blocks if each.most is None else each.most) - each.cap, missing)
        if each.by_energy and more > 0:
            raises.append(f"{each.name}'s energy_j to {each.joules(each.cap + more)}")
            missing -= more
    if missing:
        full = [each for each in room if not each.by_energy] or room
        keys = [each.key() for each in full if each.most is not None]
        blocks = "1 block" if missing == 1 else f"{missing} blocks in all"
        raises.append(f"{' or '.join(keys)} by {blocks}")
    return " and ".join(raises)


def no_upload(inventory: Inventory, problem: RoundProblem, why: str) -> ConfigError:
    """No cluster can afford an upload: the nearest to it, and what full power takes."""
    pairs = links(problem.uplinks, problem.channels, problem.options.fading)
    if power_limits(pairs).any():
        return ConfigError(f"{inventory.document.file}: round: {why}")
    needed = full_power_energy(pairs)
    lacking = needed / pairs.energy_j
    unit, channel = (int(place) for place in np.unravel_index(lacking.argmin(), lacking.shape))
    cluster, uplink = inventory.clusters[unit], problem.uplinks[unit]
    return inventory.document.error(
        (*cluster.loc, "uplink", "energy_j"),
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
