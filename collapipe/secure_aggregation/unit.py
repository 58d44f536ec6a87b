"""A unit's part in a masked sum, stage by stage. A stage is used up by going on to the next.

All of it is secret, and shown by no repr.
"""

import secrets
from dataclasses import dataclass
from typing import Self

from collapipe.errors import WireError
from collapipe.secure_aggregation import masks
from collapipe.secure_aggregation.masks import KEY_BYTES, Words
from collapipe.secure_aggregation.messages import (
    BothShares,
    ByUnit,
    Key,
    MaskRequest,
    PublicKeys,
    Roster,
    Round,
    Share,
    SharesReply,
    Unit,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.session import Session, place
from collapipe.secure_aggregation.shamir import SHARE_BYTES, split


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithKeys:
    """A unit that has made its private keys for a round."""

    unit: Unit
    round: Round
    mask_key: Key
    seal_key: Key

    @classmethod
    def new(cls, unit: int, round_: int) -> Self:
        return cls(unit, round_, masks.new_key(), masks.new_key())

    @property
    def public(self) -> PublicKeys:
        """What everybody may know."""
        return PublicKeys(masks.public_key(self.mask_key), masks.public_key(self.seal_key))

    def share(self, roster: Roster, threshold: float) -> tuple["UnitWithShares", SharesReply]:
        """Share both secrets with the neighbours. Raises ``WireError`` unless the roster is of this
        round, and has this unit's keys as its own."""
        _check_round(self.round, roster.round)
        if roster.keys.get(self.unit) != self.public:
            raise WireError(f"the roster of round {self.round} lacks the keys of unit {self.unit}")
        session, seed = Session(roster, threshold), secrets.token_bytes(KEY_BYTES)
        others = session.neighbours(self.unit)
        places = [place(unit) for unit in (self.unit, *others)]
        of_key, of_seed = (
            split(secret, session.shares_needed, places) for secret in (self.mask_key, seed)
        )
        sealed = dict[int, bytes]()
        for to in others:
            both, public = of_key[place(to)] + of_seed[place(to)], roster.keys[to].seal
            pair = session.digest, self.unit, to
            sealed[to] = masks.seal(both, self.seal_key, public, *pair)
        shared = UnitWithShares(self, roster, threshold, seed, of_seed[place(self.unit)])
        return shared, SharesReply(self.unit, sealed)


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithShares:
    """A unit that has shared its secrets: its ``seed``, and its own share of that."""

    before: UnitWithKeys
    roster: Roster
    threshold: float
    seed: Key
    own_share: Share

    @property
    def unit(self) -> int:
        return self.before.unit

    @property
    def num_units(self) -> int:
        """Of the round's sum, at most."""
        return len(self.roster.keys)

    def mask(self, round_: int, request: MaskRequest, words: Words) -> "MaskedUnit":
        """Mask ``words`` in place. Raises ``WireError``, and leaves them as they are, unless this
        is the session's round, and the shares are its neighbours' and enough to restore a secret.
        """
        unit, session, shares = self.unit, Session(self.roster, self.threshold), request.sealed
        _check_round(self.before.round, round_)
        strangers = shares.keys() - session.neighbours(unit)
        if strangers or len(shares) + 1 < session.shares_needed:
            raise WireError(
                f"shares of {len(shares)} units, {len(strangers)} of them no neighbours; "
                f"expected {session.shares_needed - 1} neighbours' or more"
            )
        held = {sender: self._opened(session, sender, each) for sender, each in shares.items()}
        seeds = {other: self._pair_seed(session, other) for other in held}
        masks.add_mask(words, self.seed)
        for other, seed in seeds.items():
            masks.add_mask(words, seed, negative=unit > other)
        silent = session.neighbours(unit) - held.keys()  # they have shared no secret
        units = frozenset(session.keys) - silent
        return MaskedUnit(unit, round_, units, session.units_needed, held, self.own_share)

    def _opened(self, session: Session, sender: int, sealed: bytes) -> bytes:
        private, public, to = self.before.seal_key, session.keys[sender].seal, self.before.unit
        return masks.unseal(sealed, private, public, session.digest, sender, to)

    def _pair_seed(self, session: Session, other: int) -> bytes:
        private, public, unit = self.before.mask_key, session.keys[other].mask, self.before.unit
        return masks.pair_seed(private, public, session.digest, unit, other)


@dataclass(frozen=True, slots=True, repr=False)
class MaskedUnit:
    """A unit that has sent its masked update: what it holds of its neighbours' secrets, a share of
    the mask key and one of the self mask's seed each. ``units`` are those of the round but for
    neighbours that shared no secret."""

    unit: Unit
    round: Round
    units: frozenset[Unit]
    units_needed: int
    held: ByUnit[BothShares]
    own_share: Share

    def reveal(self, request: UnmaskRequest) -> UnmaskReply:
        """One share of each neighbour. Raises ``WireError`` unless the survivors are enough of this
        round's ``units``, each once, this one among them."""
        _check_round(self.round, request.round)
        survivors = {*request.survivors}
        odd = len(survivors) < len(request.survivors) or not survivors <= self.units
        if odd or self.unit not in survivors or len(survivors) < self.units_needed:
            raise WireError(
                f"unit {self.unit} was told of {len(request.survivors)} survivors; expected "
                f"{self.units_needed} … {len(self.units)} that shared their keys, this one included"
            )
        shares = {
            other: both[SHARE_BYTES:] if other in survivors else both[:SHARE_BYTES]
            for other, both in self.held.items()
        }
        return UnmaskReply(self.unit, {**shares, self.unit: self.own_share})


@dataclass(frozen=True, slots=True)
class LastMasked:
    """The last round that a unit has masked an update for: it does so once for each."""

    round: Round


def _check_round(own: int, asked: int) -> None:
    if own != asked:
        raise WireError(f"a message of round {asked} in the masked sum of round {own}")
