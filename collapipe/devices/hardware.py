"""Device laws from data sheets or measurements, and a block's cost from its sizes."""

import math
from dataclasses import dataclass

from collapipe.state import (
    AffineLaw,
    BlockCost,
    DeviceProfile,
    EnergyBudget,
    Link,
    MemoryBudget,
    SharingLaw,
)

_FLOAT_BYTES = 4  # float32
_COPIES = 4  # weights, gradients and AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalDevice:
    """The description of a device's hardware; None means no limit."""

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
    # rates to other devices by their names, and latencies if these differ from the usual one
    links: tuple[tuple[str, float, float | None], ...] = ()

    def profile(self, cost: BlockCost) -> DeviceProfile:
        """Return the chunk law, the block limit and the energy law for blocks of ``cost``."""
        time = self.chunk or self._law(cost)
        links = tuple(
            Link(
                name,
                cost.hop_bits / rate_bps,
                time.ell if latency_s is None else latency_s,
                8 * cost.trained_bytes / rate_bps,
            )
            for name, rate_bps, latency_s in self.links
        )
        memory, energy = None, None
        if self.memory_bytes is not None:
            own = cost.segment_bytes, cost.block_bytes, cost.sample_bytes
            of_batch = cost.batch_segment_bytes, cost.batch_block_bytes
            memory = MemoryBudget(self.memory_bytes, *own, *of_batch, cost.trained_bytes)
        sharing = self._sharing(cost, memory)
        if self.energy_j is not None and self.power_w is not None:
            watts = self.power_w
            law = AffineLaw(*(watts * part for part in (time.u, time.v, time.w, time.ell)))
            sent = tuple(Link(each.to, watts * each.w, watts * each.ell) for each in links)
            sync_j = watts * sharing.sync_s if sharing else 0.0
            energy = EnergyBudget(self.energy_j, law, links=sent, sync_j=sync_j)
        held = self.max_blocks, energy, memory, sharing
        return DeviceProfile(self.name, time, *held, links=links)

    def _sharing(self, cost: BlockCost, memory: MemoryBudget | None) -> SharingLaw | None:
        """Return the law of shared stages; None if the rate or what trains is not known."""
        rate_bps = self.d2d_rate_bps
        if rate_bps is None and self.chunk is not None and self.chunk.w:
            rate_bps = cost.hop_bits / self.chunk.w  # as its hops were measured
        if rate_bps is None or not cost.trained_bytes:
            return None
        return SharingLaw(8 * cost.trained_bytes / rate_bps, self.max_blocks, memory)

    def block_limits(self, block_bytes: float | None) -> dict[str, int]:
        """Return the lower block limit of ``max_blocks`` and ``memory_bytes``; both if equal."""
        limits = {} if self.max_blocks is None else {"max_blocks": self.max_blocks}
        if self.memory_bytes is not None and block_bytes is not None:
            limits["memory_bytes"] = math.floor(self.memory_bytes / block_bytes)
        least = min(limits.values(), default=0)
        return {key: held for key, held in limits.items() if held == least}

    def _law(self, cost: BlockCost) -> AffineLaw:
        assert self.flops_per_s is not None
        return AffineLaw(
            u=cost.flops / self.flops_per_s,
            v=self.launch_s,
            w=0.0 if self.d2d_rate_bps is None else cost.hop_bits / self.d2d_rate_bps,
            ell=self.hop_latency_s,
        )


def from_db(gain: float) -> float:
    """Convert a gain from dB to linear."""
    return float(10.0 ** (gain / 10.0))


def from_dbm(power: float) -> float:
    """Convert dBm to watts, or dBm/Hz to W/Hz."""
    return float(10.0 ** (power / 10.0) * 1e-3)


def transformer_block_cost(
    dim: int, feed_forward_dim: int, tokens: int, batch_size: int
) -> BlockCost:
    """Return the cost of a block of width d with inner width f for samples of T tokens, in float32.

    Forward takes 2·T·(4d² + 2df) FLOPs in the six linear layers and 4·T²·d in attention; backward
    takes twice as many. There are 4d² + 2df + 9d + f parameters. A hop carries T·d values each way.
    The stash has T·(10d + f) values that autograd saves per sample, for all samples of a batch.
    """
    weights = 4 * dim**2 + 2 * dim * feed_forward_dim
    parameters = weights + 9 * dim + feed_forward_dim
    stash = batch_size * tokens * (10 * dim + feed_forward_dim)
    forward_flops = float(2 * tokens * weights + 4 * tokens**2 * dim)
    bits = float(8 * _FLOAT_BYTES * tokens * dim)
    return BlockCost(
        forward_flops=forward_flops,
        backward_flops=2 * forward_flops,
        activation_bits=bits,
        gradient_bits=bits,
        block_bytes=float(_FLOAT_BYTES * (_COPIES * parameters + stash)),
        batch_block_bytes=float(_FLOAT_BYTES * stash),
        trained_bytes=float(_FLOAT_BYTES * parameters),
    )
