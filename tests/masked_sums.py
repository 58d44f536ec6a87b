"""A masked sum without a network: units, an honest server, and all bytes that the server
receives."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    Roster,
    SharesReply,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
)
from collapipe.secure_aggregation.server import checked, confirmed, relayed, unmask
from collapipe.secure_aggregation.session import Session
from collapipe.secure_aggregation.unit import (
    MaskedUnit,
    UnitWithKeys,
    UnitWithShares,
    UnitWithSurvivors,
)

THRESHOLD, RUN = 2 / 3, 1


def colluders_needed(units: int, needed: int) -> int:
    """Return how many colluding units a lying server needs to learn another unit's update, if
    ``needed`` of ``units`` must finish.

    2·needed − units colluders can confirm two lists of survivors. If all units must finish, units −
    1 colluders suffice: they subtract their own updates from the sum.
    """
    return min(2 * needed - units, needed - 1)


@dataclass
class Exchange:
    """A masked round of ``num_units``; units in ``lost`` do not send that method's message."""

    num_units: int
    threshold: float = THRESHOLD
    round: int = 1
    share_replies: dict[int, SharesReply] = field(default_factory=dict)
    masked: dict[int, Words] = field(default_factory=dict)
    revealed: dict[int, UnmaskReply] = field(default_factory=dict)
    requests: dict[int, MaskRequest] = field(default_factory=dict)
    with_keys: dict[int, UnitWithKeys] = field(default_factory=dict)
    with_shares: dict[int, UnitWithShares] = field(default_factory=dict)
    with_masks: dict[int, MaskedUnit] = field(default_factory=dict)
    confirmed: dict[int, SurvivorsReply] = field(default_factory=dict)
    with_survivors: dict[int, UnitWithSurvivors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.with_keys = {n: UnitWithKeys.new(n, RUN, self.round) for n in range(self.num_units)}
        public = {unit: each.public for unit, each in self.with_keys.items()}
        self.session = Session(Roster(RUN, self.round, public), self.threshold)

    def share(self, lost: Collection[int] = ()) -> "Exchange":
        for unit, stage in self.with_keys.items():
            if unit not in lost:
                shared, reply = stage.share(self.session.roster, self.threshold)
                self.with_shares[unit], self.share_replies[unit] = shared, reply
        self.requests = relayed(self.share_replies)
        return self

    def mask(self, values: Mapping[int, Words], lost: Collection[int] = ()) -> "Exchange":
        for unit, stage in self.with_shares.items():
            if unit not in lost:
                words = values[unit].copy()
                self.with_masks[unit] = stage.mask(self.round, self.requests[unit], words)
                self.masked[unit] = words
        return self

    def confirm(self, lost: Collection[int] = ()) -> "Exchange":
        request = SurvivorsRequest(self.round, tuple(self.masked))
        for unit, stage in self.with_masks.items():
            if unit not in lost:
                self.with_survivors[unit], self.confirmed[unit] = stage.confirm(request)
        return self

    def unmask(self, lost: Collection[int] = (), terms: bytes = b"") -> Words:
        """Reveal shares, except those held by units in ``lost``, and return the sum."""
        if not self.confirmed:
            self.confirm()
        requests = confirmed(self.round, self.confirmed)
        for unit, stage in self.with_survivors.items():
            if unit not in lost:
                self.revealed[unit] = stage.reveal(requests[unit])
        return self.total(terms)

    def total(self, terms: bytes = b"") -> Words:
        """Return the sum as the server computes it from the revealed shares."""
        total = np.sum([*self.masked.values()], axis=0, dtype=np.uint32)
        shares = checked(self.share_replies, self.masked, self.revealed)
        unmask(self.session, self.masked, shares, total, terms=terms)
        return total


def drawn(num_units: int, size: int = 5, seed: int = 0) -> dict[int, Words]:
    """Draw words for each unit."""
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 2**32, size, dtype=np.uint32) for n in range(num_units)}
