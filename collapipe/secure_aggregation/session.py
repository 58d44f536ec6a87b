"""The session of a masked sum: all units of a round agree on it once they have all public keys.

It says how many of a round's n units must finish, and how many may collude with a dishonest server.

t = ``units_needed`` units must finish, and t shares restore a secret. A unit reveals shares only if
t survivors on its list, itself included, have confirmed the same list.

**Claim.** Let c < 2t − n units collude with the server. Then the server learns at most one sum of
the round, and at least t − c of its updates come from units that do not collude.

**Proof.** Below, an honest unit is one that does not collude.

1. *All honest units that reveal shares have confirmed the same list.* Let two of them have
   different lists. Each list was confirmed by t units. An honest unit confirms one list, so only
   the c colluding units can be among both groups: 2t ≤ n + c, a contradiction.

2. *The server learns at most one secret of each honest unit:* the self mask's seed of a survivor,
   the mask key of another unit. For the other secret it has only the c < t shares of colluding
   units.

3. *No part of the list can be unmasked alone.* A unit that confirms a list has added masks with
   all others on it, even if it could not open their shares. Let k honest survivors not have
   confirmed it. At least t others have, so at most n − t − k units are not on the list. Each of
   the k has added masks with t − 1 other units. At most (k − 1) + (n − t − k) + c < t − 1 of
   them are not honest units that confirmed. So masks connect each honest survivor to the honest
   ones that confirmed, and the server does not have these masks' keys.

2t − n colluding units could have two lists confirmed. A dishonest server also chooses n and the
threshold, but no owner shares secrets in a round with t < ``privacy.least_units``. If the server
could have the other updates vanish, a sum would hide nothing: so masks cancel only between units
with the same ``terms``, which stand for everything that they received before training.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import PublicKeys, Roster


@dataclass(frozen=True)
class Session:
    """A round's units and their public keys, and the fraction ``threshold`` that must finish.

    Units with different keys or a different ``threshold`` cannot open each other's shares. Raises
    ``WireError`` for fewer than two units, or if a key occurs twice.
    """

    roster: Roster
    threshold: float

    def __post_init__(self) -> None:
        all_keys = [key for each in self.keys.values() for key in (each.mask, each.seal)]
        if len(self.keys) < 2 or len({*all_keys}) < len(all_keys):
            raise WireError(f"{len(self.keys)} units, expected two or more, each with its own keys")

    @property
    def keys(self) -> Mapping[int, PublicKeys]:
        return self.roster.keys

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest that binds agreed keys to this session, so that they fit no other session."""
        parts = (unit.to_bytes(8) + k.mask + k.seal for unit, k in sorted(self.keys.items()))
        session = f"{self.roster.run} {self.roster.round} {self.threshold!r}"
        name = f"collapipe masked sum {session} ".encode()
        return hashlib.sha256(name + b"".join(parts)).digest()

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


def units_needed(units: int, threshold: float) -> int:
    """Return how many of the round's ``units`` must finish.

    This is the fraction ``threshold`` of them, rounded up, and always more than half.
    """
    return max(units // 2 + 1, math.ceil(threshold * units - 1e-9))  # 2/3 of 3 are 2


def noise_parts(units: int, threshold: float) -> int:
    """Return how many units' noise must suffice if units add it.

    This is one less than must finish, because each unit knows its own noise.
    """
    return max(1, units_needed(units, threshold) - 1)
