"""A lying server sends units different lists of survivors; colluding units help it."""

from collections.abc import Collection, Mapping
from contextlib import suppress

import numpy as np
import pytest
from masked_sums import Exchange, colluders_needed, drawn

from collapipe.errors import WireError
from collapipe.secure_aggregation import masks
from collapipe.secure_aggregation.messages import (
    MaskRequest,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.session import place, units_needed
from collapipe.secure_aggregation.shamir import SHARE_BYTES, combine

VICTIM = 0
Lists = Mapping[int, Collection[int]]


def revealed(exchange: Exchange, lists: Lists, allies: Collection[int]) -> dict[int, UnmaskReply]:
    """The replies of the units in ``lists``, each of which receives its own list of survivors.

    The allies confirm every list.
    """
    stages, sent = {}, dict[int, Mapping[int, bytes]]()
    for unit, survivors in lists.items():
        with suppress(WireError):
            request = SurvivorsRequest(1, tuple(sorted(survivors)))
            stages[unit], reply = exchange.with_masks[unit].confirm(request)
            sent[unit] = reply.confirmations
    found = {}
    for unit, stage in stages.items():
        to_it = {u: each[unit] for u, each in sent.items() if unit in each}
        for ally in allies:
            key = exchange.with_masks[ally].keys[unit]
            to_it[ally] = masks.confirmation(key, ally, lists[unit])
        with suppress(WireError):
            found[unit] = stage.reveal(UnmaskRequest(1, to_it))
    return found


def opened(exchange: Exchange, allies: Collection[int]) -> bool:
    """Whether a lying server obtains the victim's update.

    The server sends some units a list of survivors with the victim, and others one without it.
    """
    session, need = exchange.session, exchange.session.units_needed
    everybody = {*session.keys}
    honest = [unit for unit in session.keys if unit not in allies]  # the victim first
    with_victim = {*honest[: need - len(allies)]}
    lists = {unit: everybody if unit in with_victim else everybody - {VICTIM} for unit in honest}
    seeds, keys = dict[int, bytes](), dict[int, bytes]()
    for unit, reply in revealed(exchange, lists, allies).items():
        (seeds if unit in with_victim else keys)[place(unit)] = reply.shares[VICTIM]
    for ally in allies:
        both = exchange.with_masks[ally].held[VICTIM]
        keys[place(ally)], seeds[place(ally)] = both[:SHARE_BYTES], both[SHARE_BYTES:]
    if min(len(seeds), len(keys)) < need:
        return False
    seed, key = (combine(dict([*each.items()][:need])) for each in (seeds, keys))
    words = exchange.masked[VICTIM].copy()
    masks.add_mask(words, seed, negative=True)
    for other in everybody - {VICTIM}:
        pair = masks.pair_seed(key, session.keys[other].mask, session.digest, VICTIM, other)
        masks.add_mask(words, pair, negative=True)
    return np.array_equal(words, drawn(exchange.num_units)[VICTIM])


THOROUGH = [pytest.param(n, marks=pytest.mark.thorough) for n in (19, 21, 30, 40, 100)]


@pytest.mark.parametrize("num_units", [3, 4, 7, 20, *THOROUGH])
def test_opening_one_update_takes_as_many_colluding_units_as_documented(num_units: int) -> None:
    """Before all units shared masks, one colluding unit was enough from 20 units on."""
    exchange = Exchange(num_units).share().mask(drawn(num_units))
    needed = colluders_needed(num_units, units_needed(num_units, exchange.threshold))
    assert needed == 1 or not opened(exchange, [1])
    assert not opened(exchange, range(1, needed))
    assert opened(exchange, range(1, needed + 1))


def test_withheld_shares_do_not_isolate_a_unit() -> None:
    """The server withholds six units' shares from the victim, which then shares no masks with them.

    The server sends the other units different lists of survivors. Without confirmations, it could
    restore the mask keys of the nine remaining units. Three colluding units of 19 would suffice
    instead of 7.
    """
    num_units, allies, cut, left = 19, (1, 2, 3), range(4, 10), range(10, 19)
    exchange = Exchange(num_units).share()
    kept = {u: each for u, each in exchange.requests[VICTIM].sealed.items() if u not in cut}
    exchange.requests[VICTIM] = MaskRequest(kept)
    exchange.mask(drawn(num_units))
    times, lists = dict.fromkeys(left, 0), {}
    for unit in (*left, *cut):
        left_out = sorted(times.keys() - {unit}, key=lambda each: times[each])[:6]
        times |= {each: times[each] + 1 for each in left_out}
        lists[unit] = {*range(num_units)} - {*left_out}
    need = exchange.session.units_needed
    assert all(each + len(allies) >= need for each in times.values())  # shares of each key
    assert len(lists) + len(allies) >= need  # shares of the victim's seed
    assert revealed(exchange, lists, allies) == {}


def test_only_confirmations_of_survivors_count() -> None:
    """Otherwise a survivor with masks shared only with colluding and absent units is isolated."""
    exchange = Exchange(4, threshold=0.75).share().mask(drawn(4))
    everybody, three = dict.fromkeys(range(3), range(4)), dict.fromkeys(range(3), range(3))
    assert revealed(exchange, everybody, [3]).keys() == {0, 1, 2}
    assert revealed(exchange, three, []).keys() == {0, 1, 2}
    del three[2]
    assert revealed(exchange, three, [3]) == {}


def test_confirmations_of_other_lists_rounds_and_senders_do_not_count() -> None:
    exchange = Exchange(3, threshold=1.0).share().mask(drawn(3))
    stage = exchange.confirm().with_survivors[0]
    honest = {unit: exchange.confirmed[unit].confirmations[0] for unit in (1, 2)}
    assert stage.reveal(UnmaskRequest(1, honest)).shares.keys() == {0, 1, 2}
    other = Exchange(3, threshold=1.0).share().mask(drawn(3)).confirm()
    for invalid in (
        {1: honest[1]},
        {1: honest[2], 2: honest[1]},
        {1: honest[1], 2: exchange.confirmed[2].confirmations[1]},
        {
            1: honest[1],
            2: exchange.confirmed[0].confirmations[2],
        },  # its own confirmation, sent back
        {1: honest[1], 2: other.confirmed[2].confirmations[0]},
    ):
        with pytest.raises(WireError):
            stage.reveal(UnmaskRequest(1, invalid))
    with pytest.raises(WireError):
        stage.reveal(UnmaskRequest(2, honest))
