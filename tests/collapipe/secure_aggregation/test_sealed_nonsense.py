"""If a unit seals invalid shares, the sum stays exact, and sender and receiver are named."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from masked_sums import Exchange, drawn

from collapipe.errors import RoundFailedError
from collapipe.secure_aggregation.messages import SEALED_BYTES
from collapipe.secure_aggregation.server import CheckedShares, checked, relayed

NUM_UNITS = 7  # five of them must finish


def called(unit: int) -> str:
    return f"town {unit}"


def spoilt(liar: int, holders: Collection[int], lost: Collection[int] = ()) -> Exchange:
    """An exchange in which the liar sealed invalid shares for ``holders``."""
    exchange = Exchange(NUM_UNITS).share()
    reply = exchange.share_replies[liar]
    sealed = {**reply.sealed, **dict.fromkeys(holders, bytes(SEALED_BYTES))}
    exchange.share_replies[liar] = replace(reply, sealed=sealed)
    exchange.requests = relayed(exchange.share_replies)
    return exchange.mask(drawn(NUM_UNITS), lost)


def shares(exchange: Exchange) -> CheckedShares:
    return checked(exchange.share_replies, exchange.masked, exchange.revealed)


@pytest.mark.parametrize("lost", [(), (3,)])
def test_the_sum_is_exact_without_the_shares_that_cannot_be_opened(lost: tuple[int, ...]) -> None:
    """The invalid shares are of the liar's self mask, or of its mask key if it drops out."""
    exchange = spoilt(3, [0], lost)
    left = [each for unit, each in drawn(NUM_UNITS).items() if unit not in lost]
    assert np.array_equal(exchange.unmask(), np.sum(left, axis=0, dtype=np.uint32))
    assert shares(exchange).missing == {(0, 3)}
    assert shares(exchange).suspects(called) == ["town 0 or town 3"]


def test_invalid_shares_for_all_units_end_the_round_and_name_the_liar() -> None:
    exchange = spoilt(3, {*range(NUM_UNITS)} - {3})
    with pytest.raises(RoundFailedError):
        exchange.unmask()
    assert shares(exchange).suspects(called) == ["town 3"]


def test_a_unit_that_withholds_its_own_share_is_named() -> None:
    exchange = spoilt(3, [])
    exchange.unmask()
    reply = exchange.revealed[3]
    own = {unit: share for unit, share in reply.shares.items() if unit != 3}
    exchange.revealed[3] = replace(reply, shares=own)
    assert shares(exchange).suspects(called) == ["town 3"]
