"""The server learns the sum of the remaining units' vectors and nothing else."""

import itertools
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from masked_sums import RUN, THRESHOLD, Exchange, drawn

from collapipe.errors import RoundFailedError, WireError
from collapipe.secure_aggregation import masks
from collapipe.secure_aggregation.masks import Words
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    PublicKeys,
    Roster,
    SurvivorsRequest,
)
from collapipe.secure_aggregation.server import in_conflict, usable
from collapipe.secure_aggregation.session import place, units_needed
from collapipe.secure_aggregation.shamir import PRIME, combine, split
from collapipe.secure_aggregation.unit import UnitWithKeys

STAGES = 4  # a unit may drop out after each of them; after the last: never


@given(st.data())
def test_the_sum_is_exact_if_enough_units_for_the_threshold_remain(data: st.DataObject) -> None:
    num_units = data.draw(st.integers(2, 7))
    most = num_units - units_needed(num_units, THRESHOLD)
    lost = data.draw(st.sets(st.integers(0, num_units - 1), max_size=most))
    stage = {unit: data.draw(st.integers(0, STAGES - 2)) for unit in sorted(lost)}
    dropouts = [{unit for unit, last in stage.items() if last == after} for after in range(STAGES)]
    values = drawn(num_units)
    exchange = Exchange(num_units).share(dropouts[0]).mask(values, dropouts[1])
    total = exchange.unmask(dropouts[2])
    left = [values[unit] for unit in range(num_units) if unit not in dropouts[0] | dropouts[1]]
    assert np.array_equal(total, np.sum(left, axis=0, dtype=np.uint32))


def test_the_sum_is_exact_if_a_third_of_24_units_drops_out() -> None:
    num_units, values = 24, drawn(24)
    dropouts = [{3, 5, 8}, {1, 2, 20}, {4, 18}]
    exchange = Exchange(num_units).share(dropouts[0]).mask(values, dropouts[1])
    left = [values[unit] for unit in range(num_units) if unit not in dropouts[0] | dropouts[1]]
    assert np.array_equal(exchange.unmask(dropouts[2]), np.sum(left, axis=0, dtype=np.uint32))


@pytest.mark.parametrize("num_units", [4, 7])
def test_one_unit_fewer_than_the_threshold_gives_no_sum(num_units: int) -> None:
    lost = set(range(num_units - units_needed(num_units, THRESHOLD) + 1))
    exchange = Exchange(num_units).share().mask(drawn(num_units))
    with pytest.raises(RoundFailedError):
        exchange.unmask(lost)
    exchange = Exchange(num_units).share().mask(drawn(num_units), lost)
    with pytest.raises(WireError):  # the units refuse
        exchange.unmask()
    exchange = Exchange(num_units).share(lost)
    with pytest.raises(WireError):
        exchange.mask(drawn(num_units))


@pytest.mark.parametrize("num_units", [2, 4])
def test_a_threshold_just_above_a_half_reveals_no_single_update(num_units: int) -> None:
    """The server sends each half of the units a list of survivors with only that half."""
    exchange = Exchange(num_units, threshold=0.5 + 1e-10).share().mask(drawn(num_units))
    half = num_units // 2
    for survivors in (tuple(range(half)), tuple(range(half, num_units))):
        for unit in survivors:
            with pytest.raises(WireError):
                exchange.with_masks[unit].confirm(SurvivorsRequest(1, survivors))


def restored(exchange: Exchange) -> set[bytes]:
    """All secrets of any kind that the server can restore from its shares."""
    found = set[bytes]()
    for unit in exchange.share_replies:
        shares = {place(holder): reply.shares[unit] for holder, reply in exchange.revealed.items()}
        for some in itertools.combinations(shares, exchange.session.units_needed):
            found.add(combine({each: shares[each] for each in some}))
    return found


def test_the_server_can_form_the_survivors_sum_and_no_other_sum() -> None:
    """Each mask that can be formed is added to, subtracted from or omitted in each sum of vectors.

    One vector arrives after the server has dropped its unit.
    """
    units, late, values = range(4), 3, drawn(4, size=3)
    exchange = Exchange(4, threshold=0.75).share().mask(values)
    received = dict(exchange.masked)
    del exchange.masked[late], exchange.with_masks[late]
    exchange.unmask()
    key, seeds = exchange.with_keys[late].mask_key, [exchange.with_shares[n].seed for n in units]
    assert restored(exchange) == {key, *seeds[:late]}
    session = exchange.session
    known = seeds[:late] + [
        masks.pair_seed(key, session.keys[other].mask, session.digest, late, other)
        for other in units[:late]
    ]
    formed = set[bytes]()
    for signs in itertools.product((-1, 0, 1), repeat=len(known)):
        offset = np.zeros(3, np.uint32)
        for sign, seed in zip(signs, known, strict=True):
            if sign:
                masks.add_mask(offset, seed, negative=sign < 0)
        formed |= {(offset + total).tobytes() for total in sums(received).values()}
    assert {some for some, total in sums(values).items() if total.tobytes() in formed} == {
        (0, 1, 2)
    }


def sums(of: dict[int, Words]) -> dict[tuple[int, ...], Words]:
    """The sums of all non-empty sets of units."""
    return {
        some: np.sum([of[unit] for unit in some], axis=0, dtype=np.uint32)
        for count in range(1, len(of) + 1)
        for some in itertools.combinations(of, count)
    }


def test_a_unit_refuses_invalid_survivors_and_invalid_rosters() -> None:
    exchange = Exchange(3).share().mask(drawn(3))
    stage, first = exchange.with_masks[0], exchange.with_keys[0]
    for survivors in ((0,), (1, 2), (0, 1, 1), (0, 1, 7), (0, 0), tuple(range(5000)), ()):
        with pytest.raises(WireError):
            stage.confirm(SurvivorsRequest(1, survivors))
    with pytest.raises(WireError):
        stage.confirm(SurvivorsRequest(2, (0, 1, 2)))
    shares = stage.confirm(SurvivorsRequest(1, (0, 2)))[0].shares
    held = stage.held[1], stage.held[2]
    assert shares[1] == held[0][:33]  # a share of the dropped-out unit's mask key
    assert shares[2] == held[1][33:]  # a share of the survivor's self mask
    other = Exchange(3, round=2)
    with pytest.raises(WireError):  # a roster of another round, or without this unit's keys
        first.share(other.session.roster, THRESHOLD)
    with pytest.raises(WireError):
        first.share(Roster(RUN, 1, other.session.keys), THRESHOLD)
    with pytest.raises(WireError):
        first.share(Roster(RUN, 1, {0: first.public}), THRESHOLD)
    with pytest.raises(WireError, match="run"):
        first.share(replace(exchange.session.roster, run=RUN + 1), THRESHOLD)


def test_a_unit_refuses_a_sum_of_fewer_updates_than_its_owners_minimum() -> None:
    exchange = Exchange(4)  # three of them must finish
    roster, first = exchange.session.roster, exchange.with_keys[0]
    first.share(roster, THRESHOLD, 3)
    first.share(roster, 0.9, 4)
    with pytest.raises(WireError, match=r"^3 of 4 units .*privacy\.least_units=4[^\n]*$"):
        first.share(roster, THRESHOLD, 4)


def test_a_unit_that_shared_no_secret_cannot_be_a_survivor() -> None:
    """Otherwise the sum could have fewer units than the threshold."""
    exchange = Exchange(4).share({3}).mask(drawn(4))
    for stage in exchange.with_masks.values():
        with pytest.raises(WireError):
            stage.confirm(SurvivorsRequest(1, (0, 1, 2, 3)))


def test_shares_of_other_rounds_senders_and_rosters_cannot_be_opened() -> None:
    exchange = Exchange(3).share()
    stage, honest = exchange.with_shares[0], exchange.requests[0].sealed
    older = Exchange(3).share()
    for sealed, held in (
        ({1: honest[2], 2: honest[1]}, set[int]()),  # senders exchanged
        ({**honest, 2: exchange.requests[1].sealed[2]}, {1}),  # for another unit
        (older.requests[0].sealed, set()),
        ({1: honest[1], 2: bytes(len(honest[2]))}, {1}),
    ):
        words, expected = drawn(1)[0], drawn(1)[0]
        masked = stage.mask(1, MaskRequest(sealed), words)
        assert masked.held.keys() == held and masked.keys.keys() == {1, 2}
        stage.mask(1, exchange.requests[0], expected)
        assert np.array_equal(words, expected)  # no mask is missing
    for sealed in ({}, {1: honest[1], 7: honest[2]}):
        with pytest.raises(WireError):
            stage.mask(1, MaskRequest(sealed), drawn(1)[0])
    with pytest.raises(WireError):
        stage.mask(2, exchange.requests[0], drawn(1)[0])


@pytest.mark.parametrize(
    ("others", "threshold"), [({2: UnitWithKeys.new(2, RUN, 1).public}, THRESHOLD), ({}, 0.6)]
)
def test_units_with_different_rosters_or_thresholds_share_no_secrets(
    others: dict[int, PublicKeys], threshold: float
) -> None:
    one = Exchange(3)
    _, reply = one.with_keys[1].share(Roster(RUN, 1, {**one.session.keys, **others}), threshold)
    stage, _ = one.with_keys[0].share(one.session.roster, THRESHOLD)
    assert not stage.mask(1, MaskRequest({1: reply.sealed[0]}), drawn(1)[0]).held


@pytest.mark.parametrize(("terms", "lost"), [("same", ()), ("same", (0,)), ("other", ())])
def test_only_masks_of_units_with_the_same_terms_cancel(terms: str, lost: tuple[int, ...]) -> None:
    exchange, values = Exchange(3).share(), drawn(3)
    for unit, stage in exchange.with_shares.items():
        if unit not in lost:
            words, own = values[unit].copy(), terms if unit == 1 else "same"
            sealed = exchange.requests[unit]
            exchange.with_masks[unit] = stage.mask(1, sealed, words, own.encode())
            exchange.masked[unit] = words
    expected = np.sum([values[unit] for unit in exchange.masked], axis=0, dtype=np.uint32)
    assert np.array_equal(exchange.unmask(terms=b"same"), expected) is (terms == "same")


@pytest.mark.parametrize("which", ["mask", "seal"])
def test_weak_keys_and_copied_keys_are_left_out(which: str) -> None:
    exchange = Exchange(3)
    small = replace(exchange.session.keys[2], **{which: bytes(32)})
    copied = replace(exchange.session.keys[2], **{which: exchange.session.keys[0].mask})
    for keys in (small, copied):
        assert usable({**exchange.session.keys, 2: keys}).keys() == {0, 1}
    with pytest.raises(WireError):  # a unit checks the keys itself
        stage, _ = exchange.with_keys[0].share(
            Roster(RUN, 1, {**exchange.session.keys, 2: small}), THRESHOLD
        )
        stage.mask(1, MaskRequest({2: bytes(82), 1: bytes(82)}), drawn(1)[0])


@pytest.mark.parametrize(
    ("refusals", "excluded"),
    [
        ({0: set(), 1: set()}, set()),
        ({0: {4}, 1: {4}, 2: {4}}, {4}),
        ({0: {4}, 1: {4}}, {0, 1}),  # too few: they would choose whom they are summed with
        ({0: {3, 4}, 1: {4}, 2: {4}}, {0, 4}),
        ({0: {4}, 1: {4}, 2: {4}, 4: {0}}, {4}),
        ({1: {0, 2, 3}, 2: {2}}, {1, 2}),
    ],
)
def test_a_unit_is_excluded_if_as_many_as_a_sum_needs_refuse_it_or_it_refuses_another(
    refusals: dict[int, set[int]], excluded: set[int]
) -> None:
    assert in_conflict(refusals, needed=3) == excluded


def test_reprs_show_no_secret() -> None:
    exchange = Exchange(3).share().mask(drawn(3))
    exchange.confirm()
    stages = exchange.with_keys, exchange.with_shares, exchange.with_masks, exchange.with_survivors
    for stage in (each[0] for each in stages):
        assert repr(stage).startswith("<collapipe.secure_aggregation.unit.")


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_enough_shares_restore_a_secret_and_one_share_fewer_does_not(
    secret: bytes, threshold: int, data: st.DataObject
) -> None:
    places = data.draw(st.sets(st.integers(1, 10_000), min_size=threshold, max_size=12))
    shares = split(secret, threshold, places)
    some = data.draw(st.permutations(sorted(places)))[:threshold]
    assert combine({each: shares[each] for each in some}) == secret
    if threshold > 1:
        with suppress(WireError):
            assert combine({each: shares[each] for each in some[1:]}) != secret


def test_the_modulus_of_the_field_is_prime() -> None:
    """Miller–Rabin test with 20 bases."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        power = pow(base, odd, PRIME)
        powers = [pow(power, 2**k, PRIME) for k in range(twos)]
        assert power == 1 or PRIME - 1 in powers
