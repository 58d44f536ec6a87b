"""What all units of a round agree on once they know everybody's public keys."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import WireError
from collapipe.secure_aggregation.graph import neighbours, shares_needed, units_needed
from collapipe.secure_aggregation.messages import PublicKeys, Roster


@dataclass(frozen=True)
class Session:
    """A round's units with their public keys, in the order that the graph is drawn by.

    Both follow from the keys, so that the server cannot choose who is whose neighbour, and units
    that were told different keys, or a different ``threshold``, cannot open each other's shares.
    That is the share of the units that must finish. Raises ``WireError`` for fewer than two units,
    or keys that two have.
    """

    roster: Roster
    threshold: float

    def __post_init__(self) -> None:
        told = [key for each in self.keys.values() for key in (each.mask, each.seal)]
        if len(self.keys) < 2 or len({*told}) < len(told):
            raise WireError(f"{len(self.keys)} units, expected two or more, each with its own keys")

    @property
    def keys(self) -> Mapping[int, PublicKeys]:
        return self.roster.keys

    @functools.cached_property
    def digest(self) -> bytes:
        """What keys are made for, so that they are of use in no other session."""
        told = (unit.to_bytes(8) + k.mask + k.seal for unit, k in sorted(self.keys.items()))
        name = f"collapipe masked sum {self.roster.round} {self.threshold!r} ".encode()
        return hashlib.sha256(name + b"".join(told)).digest()

    def neighbours(self, unit: int) -> frozenset[int]:
        """Those that ``unit`` shares masks with."""
        return neighbours(unit, self._order, self.threshold)

    @property
    def shares_needed(self) -> int:
        """How many shares restore a secret."""
        return shares_needed(len(self.keys), self.threshold)

    @property
    def units_needed(self) -> int:
        """How many units must finish."""
        return units_needed(len(self.keys), self.threshold)

    @functools.cached_property
    def _order(self) -> list[int]:
        def drawn(unit: int) -> bytes:
            return hashlib.sha256(self.digest + unit.to_bytes(8)).digest()

        return sorted(self.keys, key=drawn)


def place(unit: int) -> int:
    """Where a unit's shares lie, which is never 0."""
    return unit + 1
