"""Whose the keys of a roster are: a unit takes those of its peers, each once, and no other."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.keys import fingerprint, make_key
from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import Roster
from collapipe.secure_aggregation.signing import check_signed, sign
from collapipe.secure_aggregation.unit import UnitWithKeys

RUN, ROUND = 7, 3
KEYS = [make_key() for _ in range(3)]
PEERS = {fingerprint(key.public_key()) for key in KEYS[1:]}


def honest() -> Roster:
    """Unit 0 is the one that checks, and need have signed nothing."""
    public = {unit: UnitWithKeys.new(unit, RUN, ROUND).public for unit in range(3)}
    signed = {unit: sign(KEYS[unit], RUN, ROUND, unit, public[unit]) for unit in (1, 2)}
    return Roster(RUN, ROUND, public, signed)


def with_signature_of(key: ec.EllipticCurvePrivateKey) -> Callable[[Roster], Roster]:
    """In place of unit 2's."""

    def forged(roster: Roster) -> Roster:
        mine = sign(key, RUN, ROUND, 2, roster.keys[2])
        return replace(roster, signed={**roster.signed, 2: mine})

    return forged


def unsigned(roster: Roster) -> Roster:
    return replace(roster, signed={1: roster.signed[1]})


def with_keys_of_the_servers(roster: Roster) -> Roster:
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


def with_nonsense(roster: Roster) -> Roster:
    odd = replace(roster.signed[2], key=b"no key")
    return replace(roster, signed={**roster.signed, 2: odd})


def test_a_roster_of_peers_is_taken() -> None:
    check_signed(honest(), 0, PEERS)
    two = honest()
    check_signed(replace(two, keys={n: two.keys[n] for n in (0, 1)}), 0, PEERS)  # one is away


@pytest.mark.parametrize(
    "forged",
    [
        unsigned,
        with_keys_of_the_servers,
        of_another_round,
        of_another_run,
        signed_in_another_run,
        with_units_exchanged,
        with_nonsense,
        with_signature_of(KEYS[1]),  # who is there already
        with_signature_of(make_key()),
        with_signature_of(ec.generate_private_key(ec.SECP384R1())),
    ],
)
def test_what_a_server_may_put_into_a_roster_is_refused(forged: Callable[[Roster], Roster]) -> None:
    with pytest.raises(WireError, match=r"privacy\.peers"):
        check_signed(forged(honest()), 0, PEERS)
