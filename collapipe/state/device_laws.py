"""What a device spends and holds: laws of time, energy and memory, of sharing and of links."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from collapipe.errors import ConfigError
from collapipe.state.limits import MOST_LAW, ROUNDING, admitted, check_count, check_within

EnergyScope = Literal["batch", "micro_batch"]


@dataclass(frozen=True, slots=True)
class AffineLaw:
    """An amount that a device spends on one micro-batch, forward and backward together.

    amount(δ, b̂) = δ·(u·b̂ + v) + (w·b̂ + ell), for δ blocks and b̂ samples. As a time in seconds, the
    term with δ is the compute C and the rest the hop H to the next device (eq. 15: u = o/F,
    v = o'/F, w = 0, ell = τ^dd). As an energy in joules, it is eq. 16.
    """

    u: float
    v: float
    w: float
    ell: float

    def __post_init__(self) -> None:
        check_within(self, ("u", "v", "w", "ell"), MOST_LAW)

    def compute(self, blocks: int, micro_batch_size: float) -> float:
        """Return C = δ·(u·b̂ + v)."""
        return blocks * (self.u * micro_batch_size + self.v)

    def hop(self, micro_batch_size: float) -> float:
        """Return H = w·b̂ + ℓ."""
        return self.w * micro_batch_size + self.ell

    def chunk(self, blocks: int, micro_batch_size: float) -> float:
        """Return C + H."""
        return self.compute(blocks, micro_batch_size) + self.hop(micro_batch_size)

    def taking(self, times: float, sent: float = 1.0) -> "AffineLaw":
        """Return the law with computes multiplied by ``times`` and hop bits by ``sent``."""
        amounts = self.u * times, self.v * times, self.w * sent
        u, v, w = (admitted(each, MOST_LAW) for each in amounts)
        return replace(self, u=u, v=v, w=w)


@dataclass(frozen=True, slots=True)
class EnergyBudget:
    """Energy limit of a device (E_k^max, C9); ``law`` gives the joules of one micro-batch.

    ``links`` give the joules of some of the device's links, whose hops take others than usual ones.
    The limit applies to all m micro-batches of a batch and the adding of gradients together or,
    with scope ``micro_batch``, to each micro-batch, as the paper prints C9'.
    """

    limit_j: float
    law: AffineLaw
    scope: EnergyScope = "batch"
    links: tuple["Link", ...] = ()
    sync_j: float = 0.0  # of sending what trains in a block over the usual hop, see ``SharingLaw``

    def __post_init__(self) -> None:
        check_within(self, ("limit_j", "sync_j"))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory limit of a device (C7) if memory depends on the size of a micro-batch.

    bytes(δ, b̂) = segment_bytes + δ·(block_bytes + sample_bytes·⌈b̂⌉), for δ blocks and b̂ samples;
    the largest micro-batch has ⌈b̂⌉ samples. ``segment_bytes`` and ``block_bytes`` include what is
    kept for all rows of a batch. A device keeps this only for the micro-batches that are under way
    in its schedule, and of a shared stage for its own rows. A shared stage adds
    ``received_gradients``.
    """

    limit_bytes: float
    segment_bytes: float
    block_bytes: float
    sample_bytes: float
    batch_segment_bytes: float = 0.0  # of ``segment_bytes``, for all rows of a batch
    batch_block_bytes: float = 0.0  # of ``block_bytes``, likewise
    trained_bytes: float = 0.0  # of a block's gradients

    def __post_init__(self) -> None:
        own = "limit_bytes", "segment_bytes", "block_bytes", "sample_bytes"
        check_within(self, (*own, "batch_segment_bytes", "batch_block_bytes", "trained_bytes"))
        for name in ("segment_bytes", "block_bytes"):
            whole, part = getattr(self, name), getattr(self, f"batch_{name}")
            if part > whole:
                raise ConfigError(f"MemoryBudget: batch_{name}={part} is more than {name}={whole}")

    def blocks(self, micro_batch_size: float, most: int, kept: float = 1.0) -> int:
        """Return how many blocks fit, at most ``most``, if the tensors of ``kept`` of a batch's
        rows are kept at the same time."""
        limit = self.limit_bytes * (1 + ROUNDING)
        left = limit - (self.segment_bytes - (1 - kept) * self.batch_segment_bytes)
        if left < 0:
            return 0
        each = self.block_bytes - (1 - kept) * self.batch_block_bytes
        each += self.sample_bytes * math.ceil(micro_batch_size)
        return most if left >= most * each else math.floor(left / each)


@dataclass(frozen=True, slots=True)
class SharingLaw:
    """What limits and delays a device that holds whole rows of a stage that others share.

    After a batch the g devices of a stage add their gradients in a ring, which takes
    2·(g − 1)/g·δ·``sync_s`` seconds for δ blocks and the largest ``sync_s`` among them.
    """

    sync_s: float  # seconds in which the device sends what trains in a block
    max_blocks: int | None = None  # its owner's limit; None: any number
    memory: MemoryBudget | None = None  # None: no limit

    def __post_init__(self) -> None:
        check_within(self, ("sync_s",))
        check_count("SharingLaw: max_blocks", self.max_blocks or 0)


def received_gradients(
    blocks: int, part: float, members: int, own: int = 1, others: int | None = None
) -> float:
    """Return how many blocks' gradients a device with ``part`` of the rows has at most beyond one
    set: (g - 1)·min(δ, (δ + g - 1)·part) from the other members of a stage.

    Each other member sends those of the blocks that the device leads. The second bound holds for
    all divisions of leaders in proportion to rows by D'Hondt's method, see ``rows.leaders``. With
    several ``own`` shares after a loss it has a set of each, and receives those of ``others``.
    """
    received = members - 1 if others is None else others
    led = min(float(blocks), (blocks + members - 1) * part)
    return (own - 1) * blocks + received * led


def ring_s(laws: Sequence[SharingLaw | None], blocks: int) -> float:
    """Return the seconds in which devices with these laws add the gradients of ``blocks`` blocks in
    a ring; 0 for a device alone."""
    slowest = max((law.sync_s for law in laws if law is not None), default=0.0)
    return 2 * (len(laws) - 1) / len(laws) * blocks * slowest


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What differs on a device that keeps only its segment's inputs, and computes its forward pass
    again before backward."""

    times: float  # factor of a block's compute, 1 to 2
    memory: MemoryBudget

    def __post_init__(self) -> None:
        if not 1 <= self.times <= 2:
            raise ConfigError(
                f"Recomputing: times={self.times}; forward is computed once more, 1 … 2"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """A device's hop to another one, if it differs from its usual hop: it takes w·b̂ + ell seconds
    for b̂ samples."""

    to: str  # the other device's name
    w: float
    ell: float
    sync_s: float | None = None  # see ``SharingLaw``; None: the device's own

    def __post_init__(self) -> None:
        check_within(self, ("w", "ell"), MOST_LAW)
        check_within(self, ("sync_s",) if self.sync_s is not None else ())
