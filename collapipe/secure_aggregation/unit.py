"""A unit's stages in a masked sum. Each stage is used once, to make the next one.

All stages are secret and have no repr.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Self

from collapipe.errors import WireError, few_of
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
    Run,
    Share,
    SharesReply,
    SurvivorsReply,
    SurvivorsRequest,
    Tag,
    Unit,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.session import Session, place
from collapipe.secure_aggregation.shamir import SHARE_BYTES, digest, split


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithKeys:
    """Stage 1: the unit has made its private keys for a round of a run."""

    unit: Unit
    run: Run
    round: Round
    mask_key: Key
    seal_key: Key

    @classmethod
    def new(cls, unit: int, run: int, round_: int) -> Self:
        return cls(unit, run, round_, masks.new_key(), masks.new_key())

    @property
    def public(self) -> PublicKeys:
        """The public keys of both private keys."""
        return PublicKeys(masks.public_key(self.mask_key), masks.public_key(self.seal_key))

    def share(
        self, roster: Roster, threshold: float, least_units: int = 0
    ) -> tuple["UnitWithShares", SharesReply]:
        """Share the mask key and a new self mask seed with the other units of the roster.

        Raises ``WireError`` if the roster is of another round or run, or lacks this unit's keys.
        Also raises it if a sum of fewer than ``least_units`` updates would be possible.
        """
        _check_round(self.round, roster.round)
        if roster.run != self.run or roster.keys.get(self.unit) != self.public:
            raise WireError(
                f"the roster of run {roster.run}, round {roster.round} lacks the keys of unit "
                f"{self.unit} in run {self.run}"
            )
        session, seed = Session(roster, threshold), secrets.token_bytes(KEY_BYTES)
        if (needed := session.units_needed) < least_units:
            raise WireError(
                f"{needed} of {len(roster.keys)} units are enough for a sum, expected "
                f"privacy.least_units={least_units} of the owner's file or more; raise "
                "privacy.threshold, or have more units take part in a round"
            )
        others = session.others(self.unit)
        places = [place(unit) for unit in (self.unit, *others)]
        of_key, of_seed = (split(secret, needed, places) for secret in (self.mask_key, seed))
        sealed = dict[int, bytes]()
        for to in others:
            both, public = of_key[place(to)] + of_seed[place(to)], roster.keys[to].seal
            pair = session.digest, self.unit, to
            sealed[to] = masks.seal(both, self.seal_key, public, *pair)
        digests = {
            holder: digest(of_key[place(holder)]) + digest(of_seed[place(holder)])
            for holder in roster.keys
        }
        shared = UnitWithShares(self, roster, threshold, seed, of_seed[place(self.unit)])
        return shared, SharesReply(self.unit, sealed, digests)


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithShares:
    """Stage 2: the unit has shared its secrets, and keeps ``own_share`` of its ``seed``."""

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
        """Largest possible number of units in the round's sum."""
        return len(self.roster.keys)

    def mask(
        self, round_: int, request: MaskRequest, words: Words, terms: bytes = b""
    ) -> "MaskedUnit":
        """Mask ``words`` in place. Masks of units with different ``terms`` do not cancel.

        Shares that cannot be opened are left out: the unit will not reveal any for their sender.
        Raises ``WireError`` for another round, for shares of units outside the session, or for too
        few shares to restore a secret; the words are then unchanged.
        """
        unit, session, shares = self.unit, Session(self.roster, self.threshold), request.sealed
        _check_round(self.before.round, round_)
        unknown = shares.keys() - session.others(unit)
        if unknown or len(shares) + 1 < session.units_needed:
            raise WireError(
                f"shares of {len(shares)} units, {len(unknown)} of them not in the roster; "
                f"expected shares of {session.units_needed - 1} other units or more"
            )
        own, keys, digest_ = self.before, session.keys, session.digest
        held = dict[int, bytes]()
        for sender, each in shares.items():
            pair = keys[sender].seal, digest_, sender, unit
            if (both := masks.unseal(each, own.seal_key, *pair)) is not None:
                held[sender] = both
        seeds = {
            other: masks.pair_seed(own.mask_key, keys[other].mask, digest_ + terms, unit, other)
            for other in shares
        }
        masks.add_mask(words, self.seed)
        for other, seed in seeds.items():
            masks.add_mask(words, seed, negative=unit > other)
        confirming = {
            other: masks.confirming_key(own.seal_key, keys[other].seal, digest_, unit, other)
            for other in shares
        }
        return MaskedUnit(unit, round_, session.units_needed, held, self.own_share, confirming)


@dataclass(frozen=True, slots=True, repr=False)
class MaskedUnit:
    """Stage 3: the unit has sent its masked update.

    ``keys`` confirm survivors to the other units with which it shares masks. ``held`` has the
    shares of these units that it could open: of the mask key, then of the self mask's seed.
    """

    unit: Unit
    round: Round
    units_needed: int
    held: ByUnit[BothShares]
    own_share: Share
    keys: ByUnit[Key]

    def confirm(self, request: SurvivorsRequest) -> tuple["UnitWithSurvivors", SurvivorsReply]:
        """Confirm the list of survivors to each other survivor.

        Raises ``WireError`` if the list is too short, names a unit twice, lacks this unit, or has a
        unit with which this one shares no masks.
        """
        _check_round(self.round, request.round)
        survivors, known = {*request.survivors}, {self.unit, *self.keys}
        invalid = len(survivors) < len(request.survivors) or not survivors <= known
        if invalid or self.unit not in survivors or len(survivors) < self.units_needed:
            raise WireError(
                f"was sent {len(request.survivors)} survivors; expected "
                f"{self.units_needed} … {len(known)} that shared their keys, this unit included"
            )
        keys = {other: key for other, key in self.keys.items() if other in survivors}
        sent = {other: masks.confirmation(key, self.unit, survivors) for other, key in keys.items()}
        expected = {other: masks.confirmation(key, other, survivors) for other, key in keys.items()}
        shares = {
            other: both[SHARE_BYTES:] if other in survivors else both[:SHARE_BYTES]
            for other, both in self.held.items()
        }
        shares[self.unit] = self.own_share
        next_stage = UnitWithSurvivors(self.unit, self.round, self.units_needed, expected, shares)
        return next_stage, SurvivorsReply(self.unit, sent)


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithSurvivors:
    """Stage 4: the unit has confirmed its list of survivors.

    It reveals its ``shares`` if enough others send the ``expected`` confirmations of that list.
    """

    unit: Unit
    round: Round
    units_needed: int
    expected: ByUnit[Tag]
    shares: ByUnit[Share]

    def reveal(self, request: UnmaskRequest) -> UnmaskReply:
        """Return one share of each unit.

        Raises ``WireError`` if too few survivors, this one included, confirmed the same list.
        """
        _check_round(self.round, request.round)
        same = {
            other
            for other, each in request.confirmations.items()
            if other in self.expected and hmac.compare_digest(each, self.expected[other])
        }
        if len(same) + 1 < self.units_needed:
            differing = few_of(f"unit {other}" for other in request.confirmations.keys() - same)
            raise WireError(
                f"{len(same) + 1} units confirm the survivors that this unit was sent, "
                f"expected {self.units_needed} or more; {differing or 'nobody'} was sent others"
            )
        return UnmaskReply(self.unit, self.shares)


@dataclass(frozen=True, slots=True)
class LastMasked:
    """The last round for which a unit has masked an update: it masks one per round."""

    round: Round


def _check_round(own: int, received: int) -> None:
    if own != received:
        raise WireError(f"a message of round {received} in the masked sum of round {own}")
