"""A masked sum without a network: units, an honest server, and all bytes that it got."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    Roster,
    SharesReply,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.server import relayed, unmask
from collapipe.secure_aggregation.session import Session
from collapipe.secure_aggregation.unit import MaskedUnit, UnitWithKeys, UnitWithShares

THRESHOLD = 2 / 3


@dataclass
class Exchange:
    """A round of ``num_units``; the sets say who is gone after which message."""

    num_units: int
    threshold: float = THRESHOLD
    round: int = 1
    told: dict[int, SharesReply] = field(default_factory=dict)
    masked: dict[int, Words] = field(default_factory=dict)
    revealed: dict[int, UnmaskReply] = field(default_factory=dict)
    requests: dict[int, MaskRequest] = field(default_factory=dict)
    with_keys: dict[int, UnitWithKeys] = field(default_factory=dict)
    with_shares: dict[int, UnitWithShares] = field(default_factory=dict)
    with_masks: dict[int, MaskedUnit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.with_keys = {n: UnitWithKeys.new(n, self.round) for n in range(self.num_units)}
        public = {unit: each.public for unit, each in self.with_keys.items()}
        self.session = Session(Roster(self.round, public), self.threshold)

    def share(self, gone: Collection[int] = ()) -> "Exchange":
        for unit, stage in self.with_keys.items():
            if unit not in gone:
                shared, reply = stage.share(self.session.roster, self.threshold)
                self.with_shares[unit], self.told[unit] = shared, reply
        self.requests = relayed(self.session, self.told)
        return self

    def mask(self, values: Mapping[int, Words], gone: Collection[int] = ()) -> "Exchange":
        for unit, stage in self.with_shares.items():
            if unit not in gone:
                words = values[unit].copy()
                self.with_masks[unit] = stage.mask(self.round, self.requests[unit], words)
                self.masked[unit] = words
        return self

    def unmask(self, gone: Collection[int] = ()) -> Words:
        request = UnmaskRequest(self.round, tuple(self.masked))
        for unit, stage in self.with_masks.items():
            if unit not in gone:
                self.revealed[unit] = stage.reveal(request)
        return self.total()

    def total(self) -> Words:
        """What the server takes for the sum, of what was revealed."""
        total = np.sum([*self.masked.values()], axis=0, dtype=np.uint32)
        unmask(self.session, self.told, self.masked, self.revealed, total)
        return total


def drawn(num_units: int, size: int = 5, seed: int = 0) -> dict[int, Words]:
    """Words of each unit."""
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 2**32, size, dtype=np.uint32) for n in range(num_units)}
