"""What a server learns that sends units different survivors, with the help of colluding units."""

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
    """What the units of ``lists`` reveal, each of which was sent the survivors there. The allies
    confirm whatever somebody was sent."""
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
    """Whether a server gets the victim's update that tells some units that the victim is there, and
    the others that it is gone."""
    session, need = exchange.session, exchange.session.units_needed
    everybody = {*session.keys}
    honest = [unit for unit in session.keys if unit not in allies]  # the victim first
    there = {*honest[: need - len(allies)]}
    lists = {unit: everybody if unit in there else everybody - {VICTIM} for unit in honest}
    seeds, keys = dict[int, bytes](), dict[int, bytes]()
    for unit, reply in revealed(exchange, lists, allies).items():
        (seeds if unit in there else keys)[place(unit)] = reply.shares[VICTIM]
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
def test_one_units_update_takes_as_many_colluding_units_as_the_page_says(num_units: int) -> None:
    """From 20 units on one was enough while units shared masks with some of the others only."""
    exchange = Exchange(num_units).share().mask(drawn(num_units))
    needed = colluders_needed(num_units, units_needed(num_units, exchange.threshold))
    assert needed == 1 or not opened(exchange, [1])
    assert not opened(exchange, range(1, needed))
    assert opened(exchange, range(1, needed + 1))


def test_shares_that_were_withheld_cut_nobody_off() -> None:
    """The server keeps six units' shares from the victim, which shares no masks with them then, and
    tells the others different units that are gone. Without confirmations it would restore the mask
    keys of the nine that are left, with three colluding units of 19, in place of 7."""
    num_units, allies, cut, left = 19, (1, 2, 3), range(4, 10), range(10, 19)
    exchange = Exchange(num_units).share()
    kept = {u: each for u, each in exchange.requests[VICTIM].sealed.items() if u not in cut}
    exchange.requests[VICTIM] = MaskRequest(kept)
    exchange.mask(drawn(num_units))
    times, lists = dict.fromkeys(left, 0), {}
    for unit in (*left, *cut):
        gone = sorted(times.keys() - {unit}, key=lambda each: times[each])[:6]
        times |= {each: times[each] + 1 for each in gone}
        lists[unit] = {*range(num_units)} - {*gone}
    need = exchange.session.units_needed
    assert all(each + len(allies) >= need for each in times.values())  # shares of each key
    assert len(lists) + len(allies) >= need  # shares of the victim's seed
    assert revealed(exchange, lists, allies) == {}


def test_only_survivors_count_as_having_confirmed() -> None:
    """Else a survivor that shares masks with colluding and absent units alone could be cut off."""
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
    for odd in (
        {1: honest[1]},
        {1: honest[2], 2: honest[1]},
        {1: honest[1], 2: exchange.confirmed[2].confirmations[1]},
        {1: honest[1], 2: exchange.confirmed[0].confirmations[2]},  # its own, sent back
        {1: honest[1], 2: other.confirmed[2].confirmations[0]},
    ):
        with pytest.raises(WireError):
            stage.reveal(UnmaskRequest(1, odd))
    with pytest.raises(WireError):
        stage.reveal(UnmaskRequest(2, honest))
