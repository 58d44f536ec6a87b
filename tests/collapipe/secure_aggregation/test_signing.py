"""A unit accepts only keys that its peers signed, and one key of each peer."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.keys import fingerprint, make_key
from collapipe.secure_aggregation.messages import Roster
from collapipe.secure_aggregation.signing import sign, strangers
from collapipe.secure_aggregation.unit import UnitWithKeys

RUN, ROUND = 7, 3
KEYS = [make_key() for _ in range(3)]
PEERS = {fingerprint(key.public_key()) for key in KEYS[1:]}


def honest() -> Roster:
    """A valid roster. Unit 0 checks it, so it contains no signature of unit 0."""
    public = {unit: UnitWithKeys.new(unit, RUN, ROUND).public for unit in range(3)}
    signed = {unit: sign(KEYS[unit], RUN, ROUND, unit, public[unit]) for unit in (1, 2)}
    return Roster(RUN, ROUND, public, signed)


def with_signature_of(key: ec.EllipticCurvePrivateKey) -> Callable[[Roster], Roster]:
    """Replace unit 2's signature by one made with ``key``."""

    def forged(roster: Roster) -> Roster:
        mine = sign(key, RUN, ROUND, 2, roster.keys[2])
        return replace(roster, signed={**roster.signed, 2: mine})

    return forged


def unsigned(roster: Roster) -> Roster:
    return replace(roster, signed={1: roster.signed[1]})


def with_a_key_of_the_server(roster: Roster) -> Roster:
    return replace(roster, keys={**roster.keys, 2: UnitWithKeys.new(2, RUN, ROUND).public})


def of_another_round(roster: Roster) -> Roster:
    return replace(roster, round=ROUND + 1)


def of_another_run(roster: Roster) -> Roster:
    return replace(roster, run=RUN + 1)


def signed_in_another_run(roster: Roster) -> Roster:
    signed = sign(KEYS[2], RUN + 1, ROUND, 2, roster.keys[2])
    return replace(roster, signed={**roster.signed, 2: signed})


def with_units_exchanged(roster: Roster) -> Roster:
    one, two = roster.keys[1], roster.keys[2]
    signed = {1: roster.signed[2], 2: roster.signed[1]}
    return replace(roster, keys={**roster.keys, 1: two, 2: one}, signed=signed)


def with_an_invalid_key(roster: Roster) -> Roster:
    invalid = replace(roster.signed[2], key=b"no key")
    return replace(roster, signed={**roster.signed, 2: invalid})


def test_a_roster_signed_by_peers_is_accepted() -> None:
    assert strangers(honest(), 0, PEERS) == ()
    two = honest()
    two = replace(two, keys={unit: two.keys[unit] for unit in (0, 1)})
    assert strangers(two, 0, PEERS) == ()


@pytest.mark.parametrize(
    "forged",
    [
        unsigned,
        with_a_key_of_the_server,
        of_another_round,
        of_another_run,
        signed_in_another_run,
        with_units_exchanged,
        with_an_invalid_key,
        with_signature_of(KEYS[1]),  # the key of unit 1, which is in the roster
        with_signature_of(make_key()),
        with_signature_of(ec.generate_private_key(ec.SECP384R1())),
    ],
)
def test_a_unit_with_forged_keys_is_a_stranger(forged: Callable[[Roster], Roster]) -> None:
    assert 2 in strangers(forged(honest()), 0, PEERS)


def test_each_unit_without_a_peers_signature_is_a_stranger() -> None:
    assert strangers(unsigned(honest()), 0, PEERS) == (2,)
    assert strangers(of_another_round(honest()), 0, PEERS) == (1, 2)
