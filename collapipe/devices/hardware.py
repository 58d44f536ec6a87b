"""From what a data sheet or a measurement says of a device to the laws that planners take."""

import math
from dataclasses import dataclass

from collapipe.state import AffineLaw, BlockCost, DeviceProfile, EnergyBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalDevice:
    """A device as its hardware is described; a limit that is None does not bind."""

    name: str
    chunk: AffineLaw | None = None  # measured; None: it follows from the speed and the rate
    flops_per_s: float | None = None
    d2d_rate_bps: float | None = None  # forward, then backward; None: it sends nothing
    memory_bytes: float | None = None
    max_blocks: int | None = None
    energy_j: float | None = None  # of a batch
    power_w: float | None = None  # while it computes or sends
    launch_s: float = 0.0  # of a block, for each micro-batch
    hop_latency_s: float = 0.0  # of a hop, for each micro-batch

    def profile(self, cost: BlockCost) -> DeviceProfile:
        """The chunk law, the block limit and the energy law for blocks of ``cost``."""
        time = self.chunk or self._law(cost)
        held = [] if self.max_blocks is None else [self.max_blocks]
        if self.memory_bytes is not None:
            held.append(self._blocks_in_memory(cost.block_bytes))
        energy = None
        if self.energy_j is not None and self.power_w is not None:
            parts = (time.u, time.v, time.w, time.ell)
            energy = EnergyBudget(self.energy_j, AffineLaw(*(self.power_w * p for p in parts)))
        return DeviceProfile(self.name, time, min(held, default=None), energy)

    def _law(self, cost: BlockCost) -> AffineLaw:
        assert self.flops_per_s is not None
        sent = cost.activation_bits + cost.gradient_bits
        return AffineLaw(
            u=(cost.forward_flops + cost.backward_flops) / self.flops_per_s,
            v=self.launch_s,
            w=0.0 if self.d2d_rate_bps is None else sent / self.d2d_rate_bps,
            ell=self.hop_latency_s,
        )

    def is_limited_by_memory(self, block_bytes: float | None) -> bool:
        """Whether its bytes hold no more blocks than ``max_blocks`` allows."""
        if self.memory_bytes is None or not block_bytes:
            return False
        return self.max_blocks is None or self._blocks_in_memory(block_bytes) <= self.max_blocks

    def _blocks_in_memory(self, block_bytes: float) -> int:
        assert self.memory_bytes is not None
        return math.floor(self.memory_bytes / block_bytes)


def from_db(gain: float) -> float:
    """Linear gain."""
    return float(10.0 ** (gain / 10.0))


def from_dbm(power: float) -> float:
    """Watts; of a density, W/Hz."""
    return float(10.0 ** (power / 10.0) * 1e-3)
