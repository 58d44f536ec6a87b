"""If units reveal or deal wrong shares, the sum stays exact, and these units are named."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from masked_sums import Exchange, drawn

from collapipe.errors import RoundFailedError, WireError
from collapipe.secure_aggregation.server import CheckedShares, checked
from collapipe.secure_aggregation.shamir import DIGEST_BYTES, SHARE_BYTES, digest

NUM_UNITS = 7  # five of them must finish


def exchanged(lost: Collection[int] = ()) -> Exchange:
    exchange = Exchange(NUM_UNITS).share().mask(drawn(NUM_UNITS), lost)
    exchange.unmask()
    return exchange


def lie(exchange: Exchange, holder: int, owners: Collection[int]) -> None:
    reply = exchange.revealed[holder]
    wrong = dict.fromkeys(owners, (1).to_bytes(SHARE_BYTES))
    exchange.revealed[holder] = replace(reply, shares={**reply.shares, **wrong})


def suspects(exchange: Exchange) -> list[str]:
    return checked(exchange.share_replies, exchange.masked, exchange.revealed).suspects()


@pytest.mark.parametrize("lost", [(), (6,)])
def test_the_sum_is_exact_with_as_many_liars_as_units_may_drop_out(lost: tuple[int, ...]) -> None:
    """The liars reveal wrong shares of self masks and of a mask key."""
    exchange = exchanged(lost)
    liars = (0, 4)[: 2 - len(lost)]
    for liar in liars:
        lie(exchange, liar, range(NUM_UNITS))
    left = [each for unit, each in drawn(NUM_UNITS).items() if unit not in lost]
    assert np.array_equal(exchange.total(), np.sum(left, axis=0, dtype=np.uint32))
    assert suspects(exchange) == [f"unit {liar}" for liar in liars]


def test_one_liar_more_ends_the_round_with_an_error_that_names_the_liars() -> None:
    exchange = exchanged()
    for liar in (0, 4, 5):
        lie(exchange, liar, range(NUM_UNITS))
    with pytest.raises(RoundFailedError, match=r"4 shares .* unit 0, unit 4, unit 5$"):
        exchange.total()


def test_the_holder_and_the_owner_of_a_wrong_share_are_named() -> None:
    exchange = exchanged()
    lie(exchange, 3, [1])
    assert suspects(exchange) == ["unit 1 or unit 3"]
    lie(exchange, 1, [1])  # its own share
    assert suspects(exchange) == ["unit 1"]


def test_an_owner_with_digests_of_other_shares_is_named() -> None:
    exchange = exchanged()
    reply = exchange.share_replies[2]
    digests = dict.fromkeys(reply.digests, bytes(2 * DIGEST_BYTES))
    exchange.share_replies[2] = replace(reply, digests=digests)
    assert suspects(exchange) == ["unit 2"]
    with pytest.raises(RoundFailedError, match=r"unit 2 are usable.*: unit 2$"):
        exchange.total()


def test_an_owner_that_deals_shares_of_another_key_is_named() -> None:
    exchange = exchanged([2])
    other, own = Exchange(NUM_UNITS).share().mask(drawn(NUM_UNITS), [2]), exchange.share_replies[2]
    other.unmask()
    digests = dict(own.digests)
    for holder, reply in other.revealed.items():
        share, original = reply.shares[2], exchange.revealed[holder]
        exchange.revealed[holder] = replace(original, shares={**original.shares, 2: share})
        digests[holder] = digest(share) + bytes(DIGEST_BYTES)
    exchange.share_replies[2] = replace(own, digests=digests)
    with pytest.raises(WireError, match="unit 2 dealt"):
        exchange.total()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([], []),
        ([(1, 4), (1, 5), (1, 6), (2, 4)], ["unit 1", "unit 2 or unit 4"]),
        ([(1, 4), (5, 4)], ["unit 4"]),
        (
            [(1, 3), (1, 4), (2, 3), (2, 4)],
            [f"unit {a} or unit {b}" for a in (1, 2) for b in (3, 4)],
        ),
    ],
)
def test_the_fewest_liars_that_explain_all_wrong_shares_are_named(
    wrong: list[tuple[int, int]], named: list[str]
) -> None:
    assert CheckedShares({}, frozenset(wrong)).suspects() == named


@pytest.mark.parametrize(
    ("wrong", "dishonest"),
    [
        ([(1, 1)], {1}),  # its own share
        ([(1, 4), (1, 5), (1, 6)], {1}),
        ([(4, 1), (5, 1), (6, 1)], {1}),
        ([(1, 4), (2, 4)], set()),  # two colluding units cannot accuse the fourth one
    ],
)
def test_a_unit_is_dishonest_if_as_many_units_accuse_it_as_a_sum_needs(
    wrong: list[tuple[int, int]], dishonest: set[int]
) -> None:
    assert CheckedShares({}, frozenset(wrong)).dishonest(3) == dishonest
