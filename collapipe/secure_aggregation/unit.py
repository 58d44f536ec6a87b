"""A unit's part in a masked sum, stage by stage. A stage is used up by going on to the next.

All of it is secret, and shown by no repr.
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
    """A unit that has made its private keys for a round of a run."""

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
        """What everybody may know."""
        return PublicKeys(masks.public_key(self.mask_key), masks.public_key(self.seal_key))

    def share(
        self, roster: Roster, threshold: float, least_units: int = 0
    ) -> tuple["UnitWithShares", SharesReply]:
        """Share both secrets with the other units of the roster.

        Raises ``WireError`` unless the roster is of this round of the run and has this unit's keys
        as its own, or if fewer than ``least_units`` updates may be summed.
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
        """Mask ``words`` in place. Shares that cannot be opened are left out: the unit reveals none
        of their sender.

        Raises ``WireError``, and leaves the words as they are, unless this is the session's round,
        and the shares are of its units and enough to restore a secret.
        """
        unit, session, shares = self.unit, Session(self.roster, self.threshold), request.sealed
        _check_round(self.before.round, round_)
        strangers = shares.keys() - session.others(unit)
        if strangers or len(shares) + 1 < session.units_needed:
            raise WireError(
                f"shares of {len(shares)} units, {len(strangers)} of them not in the roster; "
                f"expected those of {session.units_needed - 1} others or more"
            )
        opened = {sender: self._opened(session, sender, each) for sender, each in shares.items()}
        held = {sender: both for sender, both in opened.items() if both is not None}
        seeds = {other: self._pair_seed(session, other) for other in shares}
        masks.add_mask(words, self.seed)
        for other, seed in seeds.items():
            masks.add_mask(words, seed, negative=unit > other)
        keys = {other: self._confirming_key(session, other) for other in shares}
        return MaskedUnit(unit, round_, session.units_needed, held, self.own_share, keys)

    def _opened(self, session: Session, sender: int, sealed: bytes) -> bytes | None:
        """The shares; None if the sender sealed something else."""
        private, public, to = self.before.seal_key, session.keys[sender].seal, self.before.unit
        try:
            return masks.unseal(sealed, private, public, session.digest, sender, to)
        except WireError:
            return None

    def _pair_seed(self, session: Session, other: int) -> bytes:
        private, public, unit = self.before.mask_key, session.keys[other].mask, self.before.unit
        return masks.pair_seed(private, public, session.digest, unit, other)

    def _confirming_key(self, session: Session, other: int) -> bytes:
        private, public, unit = self.before.seal_key, session.keys[other].seal, self.before.unit
        return masks.confirming_key(private, public, session.digest, unit, other)


@dataclass(frozen=True, slots=True, repr=False)
class MaskedUnit:
    """A unit that has sent its masked update.

    ``keys`` are those by which it confirms survivors to the other units that it shares masks with.
    ``held`` are the shares of these units that it could open, of the mask key and of the self
    mask's seed.
    """

    unit: Unit
    round: Round
    units_needed: int
    held: ByUnit[BothShares]
    own_share: Share
    keys: ByUnit[Key]

    def confirm(self, request: SurvivorsRequest) -> tuple["UnitWithSurvivors", SurvivorsReply]:
        """Confirm the survivors to each other one. Raises ``WireError`` unless these are enough,
        each named once, this unit and otherwise only units that it shares masks with among them.
        """
        _check_round(self.round, request.round)
        survivors, known = {*request.survivors}, {self.unit, *self.keys}
        odd = len(survivors) < len(request.survivors) or not survivors <= known
        if odd or self.unit not in survivors or len(survivors) < self.units_needed:
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
        told = UnitWithSurvivors(self.unit, self.round, self.units_needed, expected, shares)
        return told, SurvivorsReply(self.unit, sent)


@dataclass(frozen=True, slots=True, repr=False)
class UnitWithSurvivors:
    """A unit that has confirmed its list of survivors: the ``shares`` that it reveals if others
    confirm the same list, as ``expected`` of each."""

    unit: Unit
    round: Round
    units_needed: int
    expected: ByUnit[Tag]
    shares: ByUnit[Share]

    def reveal(self, request: UnmaskRequest) -> UnmaskReply:
        """One share of each unit. Raises ``WireError`` unless enough survivors, this one included,
        have confirmed the same list."""
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
    """The last round that a unit has masked an update for: it does so once for each."""

    round: Round


def _check_round(own: int, asked: int) -> None:
    if own != asked:
        raise WireError(f"a message of round {asked} in the masked sum of round {own}")
