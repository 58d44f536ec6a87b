"""The states that units keep between rounds: gather them at a checkpoint, restore them later."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from collapipe.errors import RoundFailedError, by_cause
from collapipe.wire import records
from collapipe.wire.messages import Failure, KeepRequest
from server_app.exclusions import causes
from server_app.places import Places
from server_app.questions import Asked, Question, groups_of
from server_app.roster import NOT_ASKED, Roster
from server_app.units import SUSPENDED, Kept, Units

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BY_THE_LAST = "the checkpoint has its state of the previous checkpoint"


def gather(
    units: Units,
    roster: Roster,
    question: Callable[[int], Question[Kept]],
    more: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[int, Kept | Failure]]:
    """Ask units for the states that they keep between rounds, such as their optimisers'
    moments. Ask a few units at a time, so that memory never holds all states, and no further ones
    once ``more`` returns false.

    Excluded units and units that missed the last round are not asked. Units that missed earlier
    rounds are asked last, and silent units less often, see ``Silences``. A unit yields a
    failure, which is logged, if it sends no state that its ``question`` allows.
    """

    def asking(unit: int) -> Asked[Kept]:
        return question(unit), records.pack(KeepRequest(units.arrived.get(unit, 0)))

    there = units.nodes.keys() - roster.excluded.keys() - roster.absent
    asked = units.at_checkpoints.due(there)
    _warn(units.places, _BY_THE_LAST, dict.fromkeys(sorted(there - asked), SUSPENDED))
    order = sorted(asked, key=lambda unit: (len(roster.missed.get(unit, ())), unit))
    for unit, answer in _ask_in_turn(units, order, asking, more):
        units.at_checkpoints.note(unit, answer)
        if isinstance(answer, Failure):
            _warn(units.places, _BY_THE_LAST, {unit: answer})
        yield unit, answer


def restore(units: Units, kept: Mapping[int, Kept]) -> dict[int, Failure]:
    """Send each unit its state of the checkpoint, which may be empty. Returns the units'
    failures, which are also logged.

    A unit that is missing or fails gets its state when it answers again. ``kept`` may read
    each state from disk on access, also in later rounds. Raises ``RoundFailedError`` if every
    unit fails.
    """
    units.saved, units.unrestored = kept, kept.keys() | units.nodes.keys()
    failures = dict[int, Failure]()
    for unit, answer in _ask_in_turn(units, sorted(units.nodes), units.restoring):
        if isinstance(answer, Failure):
            failures[unit] = answer
        else:
            units.unrestored.remove(unit)
    if len(failures) == len(units.nodes):
        of_nodes = {units.nodes[unit]: failure for unit, failure in failures.items()}
        raise RoundFailedError(f"no unit could be restored: {causes(units.places, of_nodes)}")
    _warn(units.places, "it is restored when it answers again", failures)
    return failures


def _ask_in_turn(
    units: Units,
    order: Sequence[int],
    asking: Callable[[int], Asked[T]],
    more: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[int, T | Failure]]:
    """Like ``Units.ask``, but in groups of a few units in their ``order``, so that memory holds
    only one group's messages, and while ``more`` returns true. All groups together take at most two
    timeouts."""
    timeout_s = units.settings.federation.round_timeout_s
    deadline = time.monotonic() + 2 * timeout_s
    for group in groups_of(order):
        if not more():
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            late = Failure(NOT_ASKED, f"others did not answer in {2 * timeout_s:g} s")
            yield from dict.fromkeys(group, late).items()
            continue
        answers = units.ask({unit: asking(unit) for unit in group}, left_s)
        for unit in group:
            yield unit, answers.pop(unit)


def _warn(places: Places, so: str, failures: Mapping[int, Failure]) -> None:
    causes = {unit: f"{each.kind}: {each.message}" for unit, each in failures.items()}
    for names, cause in by_cause(causes, places.called):
        _log.warning("%s: %s (%s)", names, so, cause)
