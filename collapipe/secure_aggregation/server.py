"""The server's part in a masked sum, which learns nothing but that."""

from collections.abc import Collection, Mapping

from collapipe.errors import RoundFailedError
from collapipe.secure_aggregation import masks
from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    PublicKeys,
    SharesReply,
    UnmaskReply,
)
from collapipe.secure_aggregation.session import Session, place
from collapipe.secure_aggregation.shamir import combine


def usable(told: Mapping[int, PublicKeys]) -> dict[int, PublicKeys]:
    """Of units' public keys those that are good for something, and that no unit before has told."""
    known, taken = dict[int, PublicKeys](), set[bytes]()
    for unit, keys in told.items():
        own = {keys.mask, keys.seal}
        if len(own) == 2 and not own & taken and all(map(masks.is_usable, own)):
            known[unit] = keys
            taken |= own
    return known


def relayed(session: Session, told: Mapping[int, SharesReply]) -> dict[int, MaskRequest]:
    """For each unit that shared its secrets the shares that are sealed for it."""
    return {
        unit: MaskRequest({each: told[each].sealed[unit] for each in _among(session, unit, told)})
        for unit in told
    }


def unmask(
    session: Session,
    shared: Collection[int],
    survivors: Collection[int],
    revealed: Mapping[int, UnmaskReply],
    total: Words,
) -> None:
    """Take the masks off the ``total`` of the ``survivors``' masked words, in place.

    Units have ``shared`` their secrets, and ``revealed`` shares of others'. A wrong share leaves a
    random total. Raises ``RoundFailedError`` where shares are too few, ``WireError`` where they are
    of no secret.
    """
    gone = [unit for unit in shared if unit not in survivors and _among(session, unit, survivors)]
    seeds = {unit: _secret(session, unit, revealed) for unit in survivors}
    keys = {unit: _secret(session, unit, revealed) for unit in gone}
    for seed in seeds.values():
        masks.add_mask(total, seed, negative=True)
    for unit, key in keys.items():
        for other in _among(session, unit, survivors):
            public = session.keys[other].mask
            seed = masks.pair_seed(key, public, session.digest, unit, other)
            masks.add_mask(total, seed, negative=other < unit)  # where that unit added it


def _secret(session: Session, unit: int, revealed: Mapping[int, UnmaskReply]) -> bytes:
    shares = {
        place(holder): told.shares[unit] for holder, told in revealed.items() if unit in told.shares
    }
    need = session.shares_needed
    if len(shares) < need:
        raise RoundFailedError(
            f"{len(shares)} shares came of the mask of unit {unit}, {need} restore it"
        )
    return combine(dict(list(shares.items())[:need]))


def _among(session: Session, unit: int, others: Collection[int]) -> list[int]:
    """A unit's neighbours among the others."""
    return [other for other in session.neighbours(unit) if other in others]
