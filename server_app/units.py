"""The units of a run as Flower's nodes: who is there, and what each is asked outside of rounds."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.errors import ConfigError, DataError, RoundFailedError, WireError, few_of, one_line
from collapipe.sections import FederationSettings
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.frozen_store import digest
from collapipe.wire.messages import (
    KEPT,
    EvaluateReply,
    Failure,
    KeepRequest,
    RowsReply,
    RowsRequest,
    Setup,
    StateReply,
)
from server_app.attendance import ABSENT, SILENT, Attendance
from server_app.places import Places, check_signed

Kept = dict[str, Tensors]  # what a unit keeps between rounds, by its names of it
T = TypeVar("T")
Numbered = TypeVar("Numbered", RowsReply, StateReply)
_log = logging.getLogger(__name__)
_POLL_S = 0.5
_AGAIN_S = 60.0  # for a unit that was left out to answer
_UNAVAILABLE = 3, 4, 5  # Flower's codes of errors of a node that is gone
_OF_ALL = ConfigError.__name__, DataError.__name__  # what all units have in common is wrong


@dataclass
class Units:
    """Asks nodes, and judges what they answer: what one says costs nobody else.

    ``tokenizer`` is as ``Tokenizer.pack`` makes it; ``rows`` alone can do without. ``places`` says
    which unit a node is, and remembers those with names. ``nodes`` are those of the units that are
    known by now; ``frozen_bytes`` of ``frozen`` weights went out so far. ``arrived`` is the last
    round of which each unit's answer came.
    """

    grid: Grid
    federation: FederationSettings
    tokenizer: str = ""
    frozen: Mapping[str, Tensors] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    nodes: dict[int, int] = field(default_factory=dict)
    frozen_bytes: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # units whose nodes were not there at last
    _strangers: list[int] = field(default_factory=list)  # nodes of units that are unknown
    _owed: dict[int, Kept] = field(default_factory=dict)  # to units that are yet to be restored
    _met: set[int] = field(default_factory=set)  # nodes that were asked, or need not be

    def __post_init__(self) -> None:
        self.attendance = Attendance(self.federation.miss_limit)
        digests = {part: digest(tensors) for part, tensors in self.frozen.items()}
        self._setup = Setup(self.tokenizer, digests)

    def rows(self, words: bool = True) -> dict[int, RowsReply]:
        """What each unit tells of its training rows, with ``words`` where the run is yet to make
        its tokeniser; one that tells nothing usable is left out.

        Raises ``ConfigError`` where there are too few nodes or too many, or where a
        unit cannot use the run's options or data, ``RoundFailedError`` where none tells anything.
        """
        nodes = _connected(self.grid, self.federation)
        contents = dict.fromkeys(nodes, records.pack(RowsRequest(words)))
        answers = self._ask(records.ROWS, contents, partial(records.unpack, RowsReply))
        self._place(answers, set())
        told, failures = _apart(answers)
        causes = [*failures.values()]
        for failure in causes:
            if failure.kind in _OF_ALL:
                raise ConfigError(failure.message)
        if not told:
            raise RoundFailedError(f"no unit tells of its rows: {_each(causes)}")
        for failure in causes:
            _log.warning("rows of a unit are not counted: %s: %s", failure.kind, failure.message)
        return dict(sorted((reply.unit, reply) for reply in told.values()))

    def discover(self) -> tuple[ClusterState | Failure, ...]:
        """Ask each node for its cluster's state, and give it the tokeniser and the frozen parts of
        the model that it lacks; what each unit answered, in their order.

        A unit is left out, with the reason as its answer, whose node does not answer, raises, or
        answers nonsense, or a number or name that is none or another's: the first of two keeps it.
        Raises ``ConfigError`` where there are too few nodes or too many, or where
        no unit is left and one says that it cannot use its options or data; else
        ``RoundFailedError`` where none is left.
        """
        num_units = self.federation.num_units
        self._strangers = _connected(self.grid, self.federation)
        told, causes = self._introduce(())
        if not told:
            for failure in causes:
                if failure.kind in _OF_ALL:
                    raise ConfigError(failure.message)
            raise RoundFailedError(f"no unit can report its state: {_each(causes)}")
        missing = [unit for unit in range(num_units) if unit not in told]
        absent = Failure(ABSENT, "no node has told this number")
        told |= dict(zip(missing, chain(causes, repeat(absent)), strict=False))
        return tuple(told[unit] for unit in range(num_units))

    def ask_again(
        self, round_: int, excluded: Collection[int]
    ) -> dict[int, ClusterState | Failure]:
        """Ask the ``excluded`` units that are due for their clusters' states, and nodes that have
        come, or have told no usable number; unusable answers are left out.

        A node that comes may take the number of one that is gone: a box that was started anew.
        """
        online = set(self.grid.get_node_ids())
        came = [node for node in online if node not in self._met]
        self._strangers = [node for node in self._strangers if node in online] + came
        gone = self.gone = {unit for unit, node in self.nodes.items() if node not in online}
        told, causes = self._introduce(gone) if self._strangers else ({}, [])
        for failure in causes if came else ():
            _log.warning("a node that came is left out: %s: %s", failure.kind, failure.message)
        due = [unit for unit in excluded if unit not in told and self.attendance.due(unit, round_)]
        known = {unit for unit in due if unit in self.nodes and unit not in gone}
        answers = self._states_of(known)
        self._send_owed(answers)
        told |= {reply.unit: reply.state for reply in _apart(answers)[0].values()}
        for unit in known | told.keys():
            self.attendance.asked(unit, round_, answered=unit in told)
        return told

    def states(self, units: Iterable[int]) -> dict[int, ClusterState | Failure]:
        """States of units that may have changed by what they were sent; unusable answers are left
        out."""
        answers = self._states_of(unit for unit in units if unit in self.nodes)
        return {reply.unit: reply.state for reply in _apart(answers)[0].values()}

    def evaluate(self, contents: Mapping[int, RecordDict]) -> dict[int, EvaluateReply | Failure]:
        """Send each of these units a model, and what it tells of it."""
        return self.ask(records.EVALUATE, contents, records.unpack_evaluation)

    def ask(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        unpack: Callable[[RecordDict], T],
        timeout_s: float = math.inf,
    ) -> dict[int, T | Failure]:
        """Each unit's answer to its content; a failure where it cannot be used, or none came."""
        of_nodes = {self.nodes[unit]: content for unit, content in contents.items()}
        answers = self._ask(kind, of_nodes, unpack, timeout_s)
        return {unit: answers[self.nodes[unit]] for unit in contents}

    def kept(
        self, excluded: Collection[int], check: Callable[[int, Kept], None]
    ) -> tuple[dict[int, Kept], dict[int, Failure]]:
        """What every unit keeps: its optimiser's memory and the like; not of the ``excluded`` ones.
        And why others do not tell, or tell what ``check`` raises ``WireError`` for; the log says.
        """
        contents = {
            unit: records.pack(KeepRequest(self.arrived.get(unit, 0)))
            for unit in self.nodes
            if unit not in excluded
        }
        answers = self.ask(records.KEEP, contents, _unpack_kept)
        for unit, kept in _apart(answers)[0].items():
            try:
                check(unit, kept)
            except WireError as error:
                answers[unit] = Failure("WireError", one_line(error))
        told, failures = _apart(answers)
        self._warn("the checkpoint has what it kept by the one before", failures)
        return told, failures

    def restore(self, kept: Mapping[int, Kept]) -> dict[int, Failure]:
        """Let every unit go on from what it kept then, be it nothing; one that is missing or fails
        does when it answers again. Why each failed, which the log says.

        Raises ``RoundFailedError`` where all do.
        """
        contents = {unit: records.pack_groups(kept.get(unit, {})) for unit in self.nodes}
        done, failures = _apart(self.ask(records.RESTORE, contents, records.unpack_groups))
        if not done:
            raise RoundFailedError(f"no unit goes on: {_each(failures.values())}")
        self._warn("it goes on when it answers again", failures)
        owed = (kept.keys() | failures.keys()) - done.keys()
        self._owed = {unit: kept.get(unit, {}) for unit in owed}
        return failures

    def _states_of(self, units: Iterable[int]) -> dict[int, StateReply | Failure]:
        """What the nodes of these units answer, by nodes; unusable answers are left out."""
        known = {self.nodes[unit]: unit for unit in units}
        return {
            node: reply
            for node, reply in self._states(known, known, _AGAIN_S).items()
            if isinstance(reply, StateReply) and reply.unit == known[node]
        }

    def _introduce(
        self, gone: Collection[int]
    ) -> tuple[dict[int, ClusterState | Failure], list[Failure]]:
        """States of the strangers that become known by it, and why the others do not; the places
        of the units that are ``gone`` are free."""
        answers = self._states(self._strangers, {})
        self._met.update(answers)
        self._strangers = [
            node
            for node, each in answers.items()
            if not isinstance(each, Failure) or each.kind != SILENT
        ]
        self._place(answers, self.nodes.keys() - set(gone))
        self._tell_places(answers)
        self._send_frozen(answers)
        self._send_owed(answers)
        told, failures = _apart(answers)
        for node, answer in told.items():
            self._strangers.remove(node)
            self.nodes[answer.unit] = node
        return {answer.unit: answer.state for answer in told.values()}, [*failures.values()]

    def _place(self, answers: dict[int, Numbered | Failure], taken: set[int]) -> None:
        """Let each answer be of the unit whose place the node has, and make a failure of it where
        it has none; those of other nodes are ``taken``."""
        num_units, signed = self.federation.num_units, self.places.signed()
        for node, reply in answers.items():
            if isinstance(reply, Failure):
                continue
            try:
                check_signed(reply.name, signed.get(node, reply.name))
                unit = self.places.claim(reply.name, reply.unit, num_units, taken)
            except WireError as error:
                answers[node] = Failure("WireError", str(error))
            else:
                answers[node] = replace(reply, unit=unit)
                taken.add(unit)

    def _tell_places(self, answers: dict[int, StateReply | Failure]) -> None:
        """Tell nodes that have taken themselves for another unit which they are, and ask them
        again: devices, for one, are drawn by it."""
        moved = {
            node: reply.unit
            for node, reply in answers.items()
            if isinstance(reply, StateReply)
            and isinstance(reply.state, ClusterState)
            and reply.state.unit != reply.unit
        }
        for node, reply in self._states(moved, moved).items():
            answers[node] = reply
            if isinstance(reply, StateReply) and reply.unit != moved[node]:
                fault = f"reported to be unit {reply.unit}, is {moved[node]}"
                answers[node] = Failure("WireError", fault)

    def _send_frozen(self, answers: dict[int, StateReply | Failure]) -> None:
        """Send each node the parts that it lacks; ``answers`` of those that cannot keep them are
        failures from then on."""
        for part, tensors in self.frozen.items():  # one at a time: it may be as large as a memory
            content = records.pack_groups({part: tensors})
            contents = {
                node: content
                for node, reply in answers.items()
                if isinstance(reply, StateReply) and part in reply.lacking
            }
            done = self._ask(records.FROZEN, contents, records.unpack_groups)
            answers |= {node: each for node, each in done.items() if isinstance(each, Failure)}
            self.frozen_bytes += len(contents) * records.num_bytes(tensors)

    def _send_owed(self, answers: dict[int, StateReply | Failure]) -> None:
        """Let units that answer only now go on from what they kept; as ``_send_frozen``."""
        back = {
            node: reply.unit
            for node, reply in answers.items()
            if isinstance(reply, StateReply) and reply.unit in self._owed
        }
        contents = {node: records.pack_groups(self._owed[unit]) for node, unit in back.items()}
        for node, done in self._ask(records.RESTORE, contents, records.unpack_groups).items():
            if isinstance(done, Failure):
                answers[node] = done
            else:
                del self._owed[back[node]]

    def _states(
        self, nodes: Iterable[int], known: Mapping[int, int], timeout_s: float = math.inf
    ) -> dict[int, StateReply | Failure]:
        """What nodes answer; those that are ``known`` are told which unit they are."""
        anybody = records.pack(self._setup)
        contents = {
            node: records.pack(replace(self._setup, unit=known[node])) if node in known else anybody
            for node in nodes
        }
        return self._ask(records.STATE, contents, records.unpack_state, timeout_s)

    def _warn(self, so: str, failures: Mapping[int, Failure]) -> None:
        for unit, failure in failures.items():
            told = self.places.called(unit), so, failure.kind, failure.message
            _log.warning("%s: %s (%s: %s)", *told)

    def _ask(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        unpack: Callable[[RecordDict], T],
        timeout_s: float = math.inf,
    ) -> dict[int, T | Failure]:
        """Each node's answer to its content; a failure where it cannot be used, or none came."""
        if not contents:
            return {}
        messages = [Message(content, node, kind) for node, content in contents.items()]
        timeout_s = min(timeout_s, self.federation.round_timeout_s)
        replies = self.grid.send_and_receive(messages, timeout=timeout_s)
        answers = {reply.metadata.src_node_id: answered(reply, unpack) for reply in replies}
        silence = Failure(
            SILENT, f"no answer to {kind} in {timeout_s:g} s; raise federation.round_timeout_s"
        )
        return {node: answers.get(node, silence) for node in contents}


def _apart(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """The answers, and why others have none."""
    told = {key: each for key, each in answers.items() if not isinstance(each, Failure)}
    return told, {key: each for key, each in answers.items() if isinstance(each, Failure)}


def _unpack_kept(content: RecordDict) -> Kept:
    """Groups of tensors. Raises ``WireError`` for others than units keep, before they are read."""
    for name in content.array_records.keys() - set(KEPT):
        raise WireError(f"keeps {name[:80]!r}, expected nothing but {', '.join(KEPT)}")
    return records.unpack_groups(content)


def _each(failures: Iterable[Failure]) -> str:
    return few_of(f"{each.kind}: {each.message}" for each in failures)


def _connected(grid: Grid, federation: FederationSettings) -> list[int]:
    """The nodes that are there once all are, or after ``federation.wait_s``, if they are enough."""
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


def answered(reply: Message, unpack: Callable[[RecordDict], T]) -> T | Failure:
    """What a node answered; whatever cannot be used is a failure, told in one printable line."""
    if reply.has_error():
        kind = ABSENT if reply.error.code in _UNAVAILABLE else "ClientApp"
        return Failure(kind, one_line(reply.error.reason))
    try:
        if Failure.__name__ not in reply.content:
            return unpack(reply.content)
        failure = records.unpack(Failure, reply.content, records.REPLY_LETTERS)
    except WireError as error:
        failure = Failure("WireError", str(error))
    return Failure(one_line(failure.kind), one_line(failure.message))
