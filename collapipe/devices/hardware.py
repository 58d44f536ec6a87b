"""From what a data sheet says of a device to the laws that planners take."""

from dataclasses import dataclass

from collapipe.state import AffineLaw, BlockCost, DeviceProfile, EnergyBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalDevice:
    """A device as its hardware is described.

    Attributes
    ----------
    d2d_rate_bps
        To the next device, forward and backward one after the other.
    memory_bytes, energy_j
        None: unlimited. The energy is that of a batch.
    power_w
        What it draws while it computes or sends.
    launch_s, hop_latency_s
        Fixed times of a block and of a hop, for each micro-batch.
    """

    name: str
    flops_per_s: float
    d2d_rate_bps: float
    memory_bytes: float | None = None
    energy_j: float | None = None
    power_w: float = 0.0
    launch_s: float = 0.0
    hop_latency_s: float = 0.0

    def profile(self, cost: BlockCost) -> DeviceProfile:
        """The chunk law, the block limit and the energy law for blocks of ``cost``."""
        time = AffineLaw(
            u=(cost.forward_flops + cost.backward_flops) / self.flops_per_s,
            v=self.launch_s,
            w=(cost.activation_bits + cost.gradient_bits) / self.d2d_rate_bps,
            ell=self.hop_latency_s,
        )
        blocks = None if self.memory_bytes is None else int(self.memory_bytes // cost.block_bytes)
        energy = None if self.energy_j is None else energy_at(time, self.power_w, self.energy_j)
        return DeviceProfile(self.name, time, blocks, energy)


def energy_at(time: AffineLaw, power_w: float, limit_j: float) -> EnergyBudget:
    """A batch's budget for a device that draws ``power_w`` as long as it is busy."""
    law = AffineLaw(*(power_w * part for part in (time.u, time.v, time.w, time.ell)))
    return EnergyBudget(limit_j, law)


def from_db(gain: float) -> float:
    """Linear gain."""
    return float(10.0 ** (gain / 10.0))


def from_dbm(power: float) -> float:
    """Watts; of a density, W/Hz."""
    return float(10.0 ** (power / 10.0) * 1e-3)
