"""The states that units keep between rounds: gather them at a checkpoint, restore them later."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import RecordDict

from collapipe.errors import RoundFailedError, WireError, one_line
from collapipe.wire import records
from collapipe.wire.messages import Failure, KeepRequest
from server_app import questions
from server_app.exclusions import causes
from server_app.places import Places
from server_app.questions import Question, Size, groups_of
from server_app.roster import NOT_ASKED, Roster
from server_app.units import RESTS, Kept, Units

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BY_THE_LAST = "the checkpoint has its state of the previous checkpoint"


def gather(
    units: Units,
    roster: Roster,
    most: Callable[[int], Mapping[str, int]],
    check: Callable[[int, Kept], None],
) -> Iterator[tuple[int, Kept | Failure]]:
    """Ask units for the states that they keep between rounds, such as their optimisers'
    moments. Yield a few states at a time, so that memory never holds all of them.

    Excluded units and units that missed the last round are not asked. Units that missed earlier
    rounds are asked last, and silent units less often, see ``Silences``. A unit yields a
    failure, which is logged, if it sends no state or if ``check`` raises ``WireError`` for it.
    ``most`` returns the largest size in bytes of each group of a unit's state.
    """

    def request(unit: int) -> RecordDict:
        return records.pack(KeepRequest(units.arrived.get(unit, 0)))

    def size(unit: int) -> Size:
        return questions.keep(most(unit)).size

    there = units.nodes.keys() - roster.excluded.keys() - roster.absent
    asked = units.at_checkpoints.due(there)
    _warn(units.places, _BY_THE_LAST, dict.fromkeys(sorted(there - asked), RESTS))
    order = sorted(asked, key=lambda unit: (len(roster.missed.get(unit, ())), unit))
    for unit, answer in _ask_in_turn(units, questions.keep({}), order, request, size):
        units.at_checkpoints.note(unit, answer)
        failure = answer if isinstance(answer, Failure) else _fault(unit, answer, check)
        if failure is not None:
            _warn(units.places, _BY_THE_LAST, {unit: failure})
        yield unit, failure or answer


def restore(units: Units, kept: Mapping[int, Kept]) -> dict[int, Failure]:
    """Send each unit its state of the checkpoint, which may be empty. Returns the units'
    failures, which are also logged.

    A unit that is missing or fails gets its state when it answers again. ``kept`` may read
    each state from disk on access, also in later rounds. Raises ``RoundFailedError`` if every
    unit fails.
    """
    units.saved, units.owed = kept, kept.keys() | units.nodes.keys()
    failures, question = dict[int, Failure](), questions.RESTORE
    for unit, answer in _ask_in_turn(units, question, sorted(units.nodes), units.saved_state):
        if isinstance(answer, Failure):
            failures[unit] = answer
        else:
            units.owed.remove(unit)
    if len(failures) == len(units.nodes):
        of_nodes = {units.nodes[unit]: failure for unit, failure in failures.items()}
        raise RoundFailedError(f"no unit could be restored: {causes(units.places, of_nodes)}")
    _warn(units.places, "it is restored when it answers again", failures)
    return failures


def _ask_in_turn(
    units: Units,
    question: Question[T],
    order: Sequence[int],
    content: Callable[[int], RecordDict],
    size: Callable[[int], Size] | None = None,
) -> Iterator[tuple[int, T | Failure]]:
    """Like ``Units.ask``, but in groups of a few units in their ``order``, so that memory holds
    only one group's messages. All groups together take at most two timeouts."""
    timeout_s = units.settings.federation.round_timeout_s
    deadline = time.monotonic() + 2 * timeout_s
    for group in groups_of(order):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            late = Failure(NOT_ASKED, f"others did not answer in {2 * timeout_s:g} s")
            yield from dict.fromkeys(group, late).items()
            continue
        contents = {unit: content(unit) for unit in group}
        sizes = {unit: size(unit) for unit in group} if size else None
        answers = units.ask(question, contents, left_s, sizes)
        del contents
        for unit in group:
            yield unit, answers.pop(unit)


def _fault(unit: int, kept: Kept, check: Callable[[int, Kept], None]) -> Failure | None:
    """Return the reason why a unit's state must not be stored; None if it may be stored."""
    try:
        check(unit, kept)
    except WireError as error:
        return Failure("WireError", one_line(error))
    return None


def _warn(places: Places, so: str, failures: Mapping[int, Failure]) -> None:
    for unit, failure in failures.items():
        called = places.called(unit)
        _log.warning("%s: %s (%s: %s)", called, so, failure.kind, failure.message)
