"""The session of a masked sum: all units of a round agree on it once they have all public keys."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import PublicKeys, Roster
from collapipe.secure_aggregation.thresholds import units_needed


@dataclass(frozen=True)
class Session:
    """A round's units and their public keys, and the fraction ``threshold`` that must finish.

    Units with different keys or a different ``threshold`` cannot open each other's shares. Raises
    ``WireError`` for fewer than two units, or if a key occurs twice.
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
        """Digest that binds agreed keys to this session, so that they fit no other session."""
        told = (unit.to_bytes(8) + k.mask + k.seal for unit, k in sorted(self.keys.items()))
        session = f"{self.roster.run} {self.roster.round} {self.threshold!r}"
        name = f"collapipe masked sum {session} ".encode()
        return hashlib.sha256(name + b"".join(told)).digest()

    def others(self, unit: int) -> frozenset[int]:
        """Return all units except this one, which shares masks and secrets with each of them."""
        return frozenset(self.keys) - {unit}

    @property
    def units_needed(self) -> int:
        """How many units must finish, and how many shares restore a secret."""
        return units_needed(len(self.keys), self.threshold)


def place(unit: int) -> int:
    """Return the place (x value) of a unit's shares, which is never 0."""
    return unit + 1
