"""The server's side of a masked sum: it learns the sum and no single update."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from collapipe.errors import Called, RoundFailedError, WireError, few_of, unit_called
from collapipe.secure_aggregation import masks
from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    PublicKeys,
    SharesReply,
    SurvivorsReply,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.session import Session, place
from collapipe.secure_aggregation.shamir import DIGEST_BYTES, combine, digest


def usable(sent: Mapping[int, PublicKeys]) -> dict[int, PublicKeys]:
    """Return the units' public keys that are secure and that no earlier unit has sent."""
    known, taken = dict[int, PublicKeys](), set[bytes]()
    for unit, keys in sent.items():
        own = {keys.mask, keys.seal}
        if len(own) == 2 and not own & taken and all(map(masks.is_usable, own)):
            known[unit] = keys
            taken |= own
    return known


def in_conflict(refusals: Mapping[int, Collection[int]], needed: int) -> set[int]:
    """Return units without which no unit ``refused`` the keys of another one.

    A unit is excluded if at least ``needed`` units refuse it, as many as a sum needs: fewer
    dishonest ones cannot choose the others in their sum. Other units that refuse are excluded.
    """
    counts = Counter(itertools.chain.from_iterable(refusals.values()))
    strangers = {unit for unit, count in counts.items() if count >= needed}
    return strangers | {unit for unit, refused in refusals.items() if {*refused} - strangers}


def relayed(sent: Mapping[int, SharesReply]) -> dict[int, MaskRequest]:
    """Return, for each unit that shared its secrets, the shares that are sealed for it."""
    return {
        unit: MaskRequest(
            {other: each.sealed[unit] for other, each in sent.items() if other != unit}
        )
        for unit in sent
    }


def confirmed(round_: int, sent: Mapping[int, SurvivorsReply]) -> dict[int, UnmaskRequest]:
    """Return, for each unit that confirmed the survivors, the confirmations of the others."""
    return {
        unit: UnmaskRequest(
            round_,
            {u: each.confirmations[unit] for u, each in sent.items() if unit in each.confirmations},
        )
        for unit in sent
    }


@dataclass(frozen=True, slots=True)
class CheckedShares:
    """Revealed shares, compared with the digests that their owners sent.

    ``fitting`` has the valid shares by owner and place. For each pair (holder, owner) in ``wrong``,
    the holder changed the share, or the owner sent the digest of another share. For a pair that is
    also in ``missing``, the holder revealed no share and claims that it could not open it.
    """

    fitting: Mapping[int, Mapping[int, bytes]]
    wrong: frozenset[tuple[int, int]]
    missing: frozenset[tuple[int, int]] = frozenset()

    def suspects(self, called: Called = unit_called) -> list[str]:
        """Name the smallest set of dishonest units that explains all wrong shares.

        An honest unit has wrong shares only with dishonest ones. So if there are m dishonest units,
        a unit with wrong shares with more than m others is dishonest. So is a unit whose own share
        is wrong. In each remaining pair, one unit is dishonest.
        """
        others = self._in_doubt
        for most in itertools.count():
            suspects = {u for u, each in others.items() if u in each or len(each) > most}
            left = {(min(pair), max(pair)) for pair in self.wrong if not suspects & {*pair}}
            if len(suspects) + len(left) <= most:
                break
        pairs = [f"{called(one)} or {called(other)}" for one, other in sorted(left)]
        return [*map(called, sorted(suspects)), *pairs]

    def dishonest(self, needed: int) -> set[int]:
        """Return units whose own share is wrong, and units that have wrong shares with at least
        ``needed`` others, as many as a sum needs: fewer dishonest ones cannot accuse them."""
        return {u for u, each in self._in_doubt.items() if u in each or len(each) >= needed}

    @property
    def _in_doubt(self) -> dict[int, set[int]]:
        """The units that have wrong shares, each with those with whom it has them."""
        others = defaultdict[int, set[int]](set)
        for holder, owner in self.wrong:
            others[holder].add(owner)
            others[owner].add(holder)
        return others


def checked(
    shared: Mapping[int, SharesReply],
    survivors: Collection[int],
    revealed: Mapping[int, UnmaskReply],
) -> CheckedShares:
    """Compare the shares that units ``revealed`` with the digests that the owners ``shared``."""
    fitting, wrong = {owner: dict[int, bytes]() for owner in shared}, set[tuple[int, int]]()
    missing = {
        (h, owner) for h, reply in revealed.items() for owner in shared.keys() - reply.shares
    }
    for holder, reply in revealed.items():
        for owner in reply.shares.keys() & shared.keys():
            dealt, share = shared[owner].digests[holder], reply.shares[owner]
            dealt = dealt[DIGEST_BYTES:] if owner in survivors else dealt[:DIGEST_BYTES]
            if digest(share) == dealt:
                fitting[owner][place(holder)] = share
            else:
                wrong.add((holder, owner))
    return CheckedShares(fitting, frozenset(wrong | missing), frozenset(missing))


def unmask(
    session: Session,
    survivors: Collection[int],
    shares: CheckedShares,
    total: Words,
    called: Called = unit_called,
    terms: bytes = b"",
) -> None:
    """Subtract the masks from ``total``, the sum of the ``survivors``' masked words, in place.

    ``terms`` are those with which the units masked their words.

    Raises ``RoundFailedError`` if too few ``shares`` fit. Raises ``WireError`` if they restore no
    secret, or a mask key that differs from their owner's.
    """
    secrets = {unit: _secret(session, unit, shares, called) for unit in shares.fitting}
    for unit, secret in secrets.items():
        if unit in survivors:
            masks.add_mask(total, secret, negative=True)
            continue
        if masks.public_key(secret) != session.keys[unit].mask:
            raise WireError(f"{called(unit)} dealt shares that restore another key than its own")
        for other in survivors:
            public = session.keys[other].mask
            seed = masks.pair_seed(secret, public, session.digest + terms, unit, other)
            masks.add_mask(total, seed, negative=other < unit)  # negative if that unit added it


def _secret(session: Session, unit: int, shares: CheckedShares, called: Called) -> bytes:
    found, need = shares.fitting[unit], session.units_needed
    if len(found) < need:
        suspects = few_of(shares.suspects(called), ", ") or "none"
        raise RoundFailedError(
            f"{len(found)} shares of the mask of {called(unit)} are usable, {need} are needed; "
            f"wrong shares came from: {suspects}"
        )
    try:
        return combine({each: found[each] for each in sorted(found)[:need]})
    except WireError as error:
        raise WireError(f"{called(unit)} dealt {error}") from error
