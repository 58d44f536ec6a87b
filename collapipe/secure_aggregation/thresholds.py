"""How many of a round's n units must finish, and how many may collude with a server that lies.

t = ``units_needed`` units must finish. As many shares restore a secret, and a unit reveals shares
only if t of the survivors on its list, itself included, have confirmed the same list.

**Claim.** Let c < 2t − n units collude with the server. Then the server learns at most one sum of
the round, and at least t − c of the updates in it are of units that do not collude.

**Proof.** Below, an honest unit is one that does not collude.

1. *All honest units that reveal shares have confirmed the same list.* Let two of them have
   different lists. Each list was confirmed by t units. An honest unit confirms one list, so only
   the c colluding units can be among both groups: 2t ≤ n + c, a contradiction.
2. *The server learns one secret of each honest unit at most:* the self mask's seed of a survivor,
   the mask key of another unit. Of the other secret it has the c < t shares of colluding units.
3. *No part of the list has a sum of its own.* A unit that confirms a list has added masks with
   all others on it, whether or not it could open their shares. Let k honest survivors not have
   confirmed it. At least t others have, so at most n − t − k units are not on the list. Each of
   the k has added masks with t − 1 other units. At most (k − 1) + (n − t − k) + c < t − 1 of
   them are not honest units that confirmed. So masks connect each honest survivor to the honest
   ones that confirmed, and the server has none of these masks' keys.

2t − n colluding units are enough to have two lists confirmed. A server that lies also chooses n and
the threshold, but no owner shares secrets in a round with t < ``privacy.least_units``.
"""

import math


def units_needed(units: int, threshold: float) -> int:
    """How many of the round's ``units`` must finish: the share ``threshold`` of them, and more than
    half, however close to 1/2 the threshold is."""
    return max(units // 2 + 1, math.ceil(threshold * units - 1e-9))  # 2/3 of 3 are 2


def noise_parts(units: int, threshold: float) -> int:
    """How many units' noise is enough, where units add it: one less than must finish, because each
    unit knows its own noise."""
    return max(1, units_needed(units, threshold) - 1)
