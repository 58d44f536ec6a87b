"""What all units of a round agree on once they know everybody's public keys."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import PublicKeys, Roster
from collapipe.secure_aggregation.thresholds import units_needed


@dataclass(frozen=True)
class Session:
    """A round's units with their public keys, and the share ``threshold`` of them that must finish.

    Units that were sent different keys, or use a different ``threshold``, cannot open each other's
    shares. Raises ``WireError`` for fewer than two units, or keys that two of them have.
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
        """Binds keys that two units agree on to this session: they are of no use in another one."""
        told = (unit.to_bytes(8) + k.mask + k.seal for unit, k in sorted(self.keys.items()))
        session = f"{self.roster.run} {self.roster.round} {self.threshold!r}"
        name = f"collapipe masked sum {session} ".encode()
        return hashlib.sha256(name + b"".join(told)).digest()

    def others(self, unit: int) -> frozenset[int]:
        """All units but this one: it shares masks and secrets with each of them."""
        return frozenset(self.keys) - {unit}

    @property
    def units_needed(self) -> int:
        """How many units must finish, and how many shares restore a secret."""
        return units_needed(len(self.keys), self.threshold)


def place(unit: int) -> int:
    """Where a unit's shares lie, which is never 0."""
    return unit + 1
