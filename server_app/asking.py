"""Ask Flower's nodes questions, and check their replies."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from collapipe.errors import ConfigError, WireError, one_line
from collapipe.flower.reply_parts import UNUSABLE
from collapipe.sections import FederationSettings
from collapipe.wire import records
from collapipe.wire.messages import Failure
from server_app.questions import Question, check_size
from server_app.roster import ABSENT

T = TypeVar("T")
_POLL_S = 0.5
_AT_ONCE = 8  # units whose states are in memory at the same time
_LONGEST_KIND = 64  # characters of an error's name
_GONE = "has left, or its machine cannot be reached"
_UNAVAILABLE = 3, 4, 5  # Flower's codes of errors of a node that is gone


def connected(grid: Grid, federation: FederationSettings) -> list[int]:
    """Wait up to ``federation.wait_s`` for ``federation.num_units`` nodes, and return them. Raises
    ``ConfigError`` if there are too few or too many."""
    wanted, least = federation.num_units, federation.min_units or federation.num_units
    deadline = time.monotonic() + federation.wait_s
    while len(nodes := list(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not least <= len(nodes) <= wanted:
        raise ConfigError(
            f"{len(nodes)} nodes are connected, federation.num_units={wanted}; start the others "
            f"(simulated ones by --federation-config 'num-supernodes={wanted}'), set "
            "federation.num_units, or federation.min_units to begin with fewer"
        )
    return nodes


def answered(reply: Message, question: Question[T]) -> T | Failure:
    """Return a node's answer, or a failure if it is unusable. The reply's size is checked before it
    is parsed. A failure message that the unit wrote is put in quotes."""
    if reply.has_error() and reply.error.code == UNUSABLE:
        return Failure("WireError", one_line(reply.error.reason))
    if reply.has_error():
        if reply.error.code in _UNAVAILABLE:  # Flower's text blames heartbeats in every case
            return Failure(ABSENT, _GONE)
        return Failure("ClientApp", _quoted(reply.error.reason or ""))
    try:
        check_size(reply.content, question.size)
        if Failure.__name__ not in reply.content:
            return question.unpack(reply.content)
        failure = records.unpack(Failure, reply.content)
    except WireError as error:
        return Failure("WireError", one_line(error))
    named = failure.kind.isidentifier() and len(failure.kind) <= _LONGEST_KIND
    return Failure(failure.kind if named else Failure.__name__, _quoted(failure.message))


def _quoted(words: str) -> str:
    """Put another machine's text on one line and in quotes, so that readers see its origin."""
    return '"' + one_line(words).replace('"', "'") + '"'


def apart(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """Separate the answers from the failures."""
    told = {key: each for key, each in answers.items() if not isinstance(each, Failure)}
    return told, {key: each for key, each in answers.items() if isinstance(each, Failure)}


def groups_of(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split the keys into groups of at most ``_AT_ONCE``."""
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))
