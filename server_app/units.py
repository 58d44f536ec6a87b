"""The units of a run as Flower's nodes: find them, and ask them questions outside of rounds."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.config import Settings
from collapipe.errors import (
    CollaPipeError,
    ConfigError,
    DataError,
    RoundFailedError,
    WireError,
    few_of,
    one_line,
)
from collapipe.sections import FederationSettings
from collapipe.state import ClusterState
from collapipe.tasks.task import Task
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.frozen_store import digest
from collapipe.wire.messages import (
    EvaluateReply,
    Failure,
    KeepRequest,
    RowsReply,
    RowsRequest,
    Setup,
    StateReply,
)
from server_app import questions, reply_limit
from server_app.labels import unfit_labels
from server_app.places import Places
from server_app.pulling import UNUSABLE
from server_app.questions import Question, Size, check_size
from server_app.roster import ABSENT, NOT_ASKED, SILENT, Pause, Reported, Roster, Silences

Kept = dict[str, Tensors]  # the state that a unit keeps between rounds: group → tensors
T = TypeVar("T")
Numbered = TypeVar("Numbered", RowsReply, StateReply)
_log = logging.getLogger(__name__)
_POLL_S = 0.5
_AGAIN_S = 60.0  # timeout of a new node or an excluded unit
_AT_ONCE = 8  # units whose states are in memory at the same time
_LONGEST_KIND = 64  # characters of an error's name
_BY_THE_LAST = "the checkpoint has its state of the previous checkpoint"
_RESTS = Failure(NOT_ASKED, "did not answer the last time it was asked")
_MISSED = Failure(NOT_ASKED, "missed the last round")
_GONE = "has left, or its machine cannot be reached"
_UNAVAILABLE = 3, 4, 5  # Flower's codes of errors of a node that is gone
_OF_ALL = ConfigError.__name__, DataError.__name__  # causes that all units may have in common


@dataclass
class Units:
    """Asks nodes ``questions`` and checks the replies; a bad reply affects only its sender.

    Attributes
    ----------
    settings
        The run's options, which each unit receives in its first message.
    tokenizer
        The tokeniser as ``Tokenizer.pack`` makes it; only ``rows`` works without it.
    frozen
        Frozen weights of each part of the model.
    places
        Which unit each node is; remembers the places of units with names.
    nodes
        The node of each known unit.
    bytes_down
        Bytes of frozen weights and restored states that were sent.
    arrived
        The last round of which each unit's reply arrived.
    """

    grid: Grid
    settings: Settings
    tokenizer: str = ""
    frozen: Mapping[str, Tensors] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    nodes: dict[int, int] = field(default_factory=dict)
    bytes_down: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    _strangers: list[int] = field(default_factory=list)  # nodes without a known unit
    _calls: dict[int, Pause] = field(default_factory=dict)  # when strangers are asked, by node
    _at_checkpoints: Silences = field(default_factory=Silences)
    _at_evaluations: Silences = field(default_factory=Silences)
    _kept: Mapping[int, Kept] = field(default_factory=dict)  # states of a resumed run
    _owed: set[int] = field(default_factory=set)  # units that must still be restored
    _met: set[int] = field(default_factory=set)  # nodes that are no longer new

    def __post_init__(self) -> None:
        digests = {part: digest(tensors) for part, tensors in self.frozen.items()}
        self._setup = Setup(self.settings.text, self.tokenizer, digests)

    @property
    def federation(self) -> FederationSettings:
        """The options of the run's federation."""
        return self.settings.federation

    def rows(self, words: bool = True, task: Task | None = None) -> dict[int, RowsReply]:
        """Ask each unit for a summary of its training rows, with ``words`` if the run has no
        tokeniser yet. A unit is excluded and logged if its reply is unusable or has labels that the
        ``task`` does not allow.

        Raises
        ------
        ConfigError
            If there are too few or too many nodes, or if fewer than ``federation.min_units`` units
            remain and some cannot use the run's options or data.
        RoundFailedError
            If too few units remain for other reasons.
        """
        nodes = _connected(self.grid, self.federation)
        request = records.pack(RowsRequest(self._setup.settings, words))
        answers = self._ask(questions.rows(words), dict.fromkeys(nodes, request))
        self._place(answers, set())
        told, failures = _apart(answers)
        unfit = {} if task is None else unfit_labels(told, task)
        failures |= unfit
        told = {node: reply for node, reply in told.items() if node not in unfit}
        self.places.failed.update(failures)
        self.places.barred.update(unfit)
        if len(told) < (least := self._least(len(nodes), failures)):
            raise self._too_few(len(told), len(nodes), least, failures)
        self._warn_left_out(failures)
        return dict(sorted((reply.unit, reply) for reply in told.values()))

    def discover(self) -> tuple[Reported, ...]:
        """Ask each node for its cluster's state, and send it the tokeniser and the frozen parts of
        the model that it lacks. Returns each unit's state or failure, in the units' order.

        A unit's failure excludes it: its node did not answer, raised an error, or sent a malformed
        reply, or its number or name is taken or out of range. Nodes without a usable reply on
        their rows are not asked here: ``ask_again`` asks them.

        Raises
        ------
        ConfigError
            If there are too few or too many nodes, or if no unit remains and some cannot use the
            run's options or data.
        RoundFailedError
            If no unit remains for other reasons.
        """
        num_units, failed = self.federation.num_units, self.places.failed
        nodes = _connected(self.grid, self.federation)
        told, failures = self._introduce([node for node in nodes if node not in failed], ())
        later = {node: each for node, each in failed.items() if node in nodes}
        self._met.update(later)
        self._strangers += later.keys() - self.places.barred
        for node, failure in {**later, **failures}.items():
            if failure.kind == SILENT:
                self._calls[node] = Pause().longer(1)
        failures = {**later, **failures}
        if not told:
            raise self._too_few(0, len(nodes), 1, failures)
        certified = self.places.certified()
        places = {node: self.places.place(node, certified) for node in failures}
        causes = {places[node]: failure for node, failure in failures.items()}
        others = [failure for node, failure in failures.items() if places[node] is None]
        for unit in range(num_units):
            if unit not in told:
                absent = others.pop(0) if others else Failure(ABSENT, "no node has this number")
                told[unit] = causes.get(unit, absent)
        return tuple(told[unit] for unit in range(num_units))

    def ask_again(self, round_: int, roster: Roster) -> tuple[dict[int, Reported], set[int]]:
        """Ask excluded units that are due, new nodes, and nodes without a usable reply so far for
        their clusters' states.

        Returns the usable states, and the known units that sent none. A new node may take the
        number of a node that has left, for example after a restart of its machine.
        """
        online = set(self.grid.get_node_ids())
        self._met &= online
        came = online - self._met - {*self.nodes.values()}
        self._strangers = [node for node in self._strangers if node in online and node not in came]
        self._strangers += sorted(came)
        gone = {unit for unit, node in self.nodes.items() if node not in online}
        calls = {node: self._calls.pop(node, Pause()) for node in self._strangers}
        asked = [node for node, pause in calls.items() if round_ >= pause.until]
        told, failures = self._introduce(asked, gone, _AGAIN_S)
        self._calls |= {node: pause for node, pause in calls.items() if node not in asked}
        silent = (node for node, failure in failures.items() if failure.kind == SILENT)
        self._calls |= {node: calls[node].longer(round_) for node in silent}
        self._warn_left_out({node: failures[node] for node in came & failures.keys()})
        due = {*roster.due(round_)} - told.keys() - gone
        known = due & self.nodes.keys()
        answers = self._states_of(known)
        self._send_owed(answers)
        told |= {reply.unit: reply.state for reply in _apart(answers)[0].values()}
        return told, known - told.keys()

    def states(self, units: Iterable[int]) -> dict[int, Reported]:
        """Ask these units for their current states. Unusable answers are omitted."""
        answers = self._states_of(unit for unit in units if unit in self.nodes)
        return {reply.unit: reply.state for reply in _apart(answers)[0].values()}

    def evaluate(
        self, contents: Mapping[int, RecordDict], num_labels: int, absent: Collection[int]
    ) -> dict[int, EvaluateReply | Failure]:
        """Send each of these units a model to evaluate, and return their replies.

        ``num_labels`` is the run's number of labels. Units that are ``absent``, or that
        ``Silences`` suspends, are not asked.
        """
        there = contents.keys() - absent
        asked = self._at_evaluations.due(there)
        sent = {unit: content for unit, content in contents.items() if unit in asked}
        answers = self.ask(questions.evaluate(num_labels), sent)
        for unit, answer in answers.items():
            self._at_evaluations.note(unit, answer)
        others = {unit: _RESTS if unit in there else _MISSED for unit in contents.keys() - asked}
        return {**others, **answers}

    def ask(
        self,
        question: Question[T],
        contents: Mapping[int, RecordDict],
        timeout_s: float = math.inf,
        sizes: Mapping[int, Size] | None = None,
    ) -> dict[int, T | Failure]:
        """Send each unit its content and return its answer, or a failure if there is no usable
        answer. ``sizes`` are the units' largest reply sizes if they differ from the question's."""
        of_nodes = {self.nodes[unit]: content for unit, content in contents.items()}
        most = {self.nodes[unit]: size for unit, size in (sizes or {}).items()}
        answers = self._ask(question, of_nodes, timeout_s, most)
        return {unit: answers[self.nodes[unit]] for unit in contents}

    def kept(
        self,
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
            return records.pack(KeepRequest(self.arrived.get(unit, 0)))

        def size(unit: int) -> Size:
            return questions.keep(most(unit)).size

        units = self.nodes.keys() - roster.excluded.keys() - roster.absent
        asked = self._at_checkpoints.due(units)
        self._warn(_BY_THE_LAST, dict.fromkeys(sorted(units - asked), _RESTS))
        order = sorted(asked, key=lambda unit: (len(roster.missed.get(unit, ())), unit))
        for unit, answer in self._ask_in_turn(questions.keep({}), order, request, size):
            self._at_checkpoints.note(unit, answer)
            failure = answer if isinstance(answer, Failure) else _fault(unit, answer, check)
            if failure is not None:
                self._warn(_BY_THE_LAST, {unit: failure})
            yield unit, failure or answer

    def restore(self, kept: Mapping[int, Kept]) -> dict[int, Failure]:
        """Send each unit its state of the checkpoint, which may be empty. Returns the units'
        failures, which are also logged.

        A unit that is missing or fails gets its state when it answers again. ``kept`` may read
        each state from disk on access, also in later rounds. Raises ``RoundFailedError`` if every
        unit fails.
        """
        self._kept, self._owed = kept, kept.keys() | self.nodes.keys()
        failures, question = dict[int, Failure](), questions.restore()
        for unit, answer in self._ask_in_turn(question, sorted(self.nodes), self._state_of):
            if isinstance(answer, Failure):
                failures[unit] = answer
            else:
                self._owed.remove(unit)
        if len(failures) == len(self.nodes):
            causes = {self.nodes[unit]: failure for unit, failure in failures.items()}
            raise RoundFailedError(f"no unit could be restored: {self._each(causes)}")
        self._warn("it is restored when it answers again", failures)
        return failures

    def _states_of(self, units: Iterable[int]) -> dict[int, StateReply | Failure]:
        """Ask the nodes of these units for their states. Returns the usable answers by node."""
        known = {self.nodes[unit]: unit for unit in units}
        return {
            node: reply
            for node, reply in self._states(known, known, _AGAIN_S).items()
            if isinstance(reply, StateReply) and reply.unit == known[node]
        }

    def _state_of(self, unit: int) -> RecordDict:
        """Build a unit's ``restore`` message, and count its bytes."""
        groups = self._kept.get(unit, {})
        self.bytes_down += sum(map(records.num_bytes, groups.values()))
        return records.pack_groups(groups)

    def _ask_in_turn(
        self,
        question: Question[T],
        order: Sequence[int],
        content: Callable[[int], RecordDict],
        size: Callable[[int], Size] | None = None,
    ) -> Iterator[tuple[int, T | Failure]]:
        """Like ``ask``, but in groups of a few units in their ``order``, so that memory holds only
        one group's messages. All groups together take at most two timeouts.
        """
        timeout_s = self.federation.round_timeout_s
        deadline = time.monotonic() + 2 * timeout_s
        for group in _groups(order):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = Failure(NOT_ASKED, f"others did not answer in {2 * timeout_s:g} s")
                yield from dict.fromkeys(group, late).items()
                continue
            contents = {unit: content(unit) for unit in group}
            sizes = {unit: size(unit) for unit in group} if size else None
            answers = self.ask(question, contents, left_s, sizes)
            del contents
            for unit in group:
                yield unit, answers.pop(unit)

    def _introduce(
        self, nodes: Collection[int], gone: Collection[int], timeout_s: float = math.inf
    ) -> tuple[dict[int, Reported], dict[int, Failure]]:
        """Ask ``nodes`` for their states and make them known units. Returns the states by unit, and
        the failures by node. The places of the units that are ``gone`` are free."""
        if not nodes:
            return {}, {}
        answers = self._states(nodes, {}, timeout_s)
        self._met.update(answers)
        self._place(answers, self.nodes.keys() - set(gone))
        self._tell_places(answers)
        self._send_frozen(answers)
        self._send_owed(answers)
        told, failures = _apart(answers)
        self.nodes |= {answer.unit: node for node, answer in told.items()}
        self._strangers = [node for node in self._strangers if node not in told]
        self._strangers += [node for node in failures if node not in self._strangers]
        return {answer.unit: answer.state for answer in told.values()}, failures

    def _place(self, answers: dict[int, Numbered | Failure], taken: set[int]) -> None:
        """Set each answer's unit to the place of its node; replace it by a failure if the node gets
        no place. Places in ``taken`` belong to other nodes. Nodes with certified places go
        first."""
        num_units = self.federation.num_units
        replies = {n: each for n, each in answers.items() if not isinstance(each, Failure)}
        certified = self.places.certified()
        for node in sorted(replies, key=lambda node: self.places.place(node, certified) is None):
            reply = replies[node]
            try:
                self.places.check_signed(node, reply.name, certified)
                unit = self.places.claim(reply.name, reply.unit, num_units, taken)
            except WireError as error:
                answers[node] = Failure("WireError", one_line(error))
            else:
                answers[node] = replace(reply, unit=unit)
                taken.add(unit)

    def _tell_places(self, answers: dict[int, StateReply | Failure]) -> None:
        """Send nodes that reported a wrong unit number their correct number, and ask them again,
        because devices, for example, are drawn by the unit's number."""
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
        """Send each node the parts that it lacks. The ``answers`` of nodes that cannot store them
        become failures."""
        for part, tensors in self.frozen.items():  # one at a time: a part may fill the memory
            content = records.pack_groups({part: tensors})
            contents = {
                node: content
                for node, reply in answers.items()
                if isinstance(reply, StateReply) and part in reply.lacking
            }
            done = self._ask(questions.frozen(), contents)
            answers |= {node: each for node, each in done.items() if isinstance(each, Failure)}
            self.bytes_down += len(contents) * records.num_bytes(tensors)

    def _send_owed(self, answers: dict[int, StateReply | Failure]) -> None:
        """Restore the states of units that answer only now. Failures replace their ``answers``."""
        back = {
            node: reply.unit
            for node, reply in answers.items()
            if isinstance(reply, StateReply) and reply.unit in self._owed
        }
        for group in _groups([*back]):
            contents = {node: self._state_of(back[node]) for node in group}
            for node, done in self._ask(questions.restore(), contents).items():
                if isinstance(done, Failure):
                    answers[node] = done
                else:
                    self._owed.remove(back[node])

    def _states(
        self, nodes: Iterable[int], known: Mapping[int, int], timeout_s: float = math.inf
    ) -> dict[int, StateReply | Failure]:
        """Ask ``nodes`` for their states. Nodes that are ``known`` receive their unit's number."""
        anybody = records.pack(self._setup)
        contents = {
            node: records.pack(replace(self._setup, unit=known[node])) if node in known else anybody
            for node in nodes
        }
        return self._ask(questions.state(), contents, timeout_s)

    def _warn(self, so: str, failures: Mapping[int, Failure]) -> None:
        for unit, failure in failures.items():
            told = self.places.called(unit), so, failure.kind, failure.message
            _log.warning("%s: %s (%s: %s)", *told)

    def _warn_left_out(self, failures: Mapping[int, Failure]) -> None:
        certified = self.places.certified() if failures else {}
        for node, failure in failures.items():
            who = self.places.of_node(node, certified)
            _log.warning("%s is excluded: %s: %s", who, failure.kind, failure.message)

    def _least(self, there: int, failures: Mapping[int, Failure]) -> int:
        """Return how many units must have rows: ``federation.min_units`` if it is set, else one.

        All units must have rows if some cannot use their options or data and units have no
        certificates, because the options and data are then the run's.
        """
        own = self.places.signed is None and _of_all(failures)
        return self.federation.min_units or (there if own else 1)

    def _too_few(
        self, able: int, there: int, least: int, failures: Mapping[int, Failure]
    ) -> CollaPipeError:
        """The error of a run in which only ``able`` units can begin, of ``least`` required ones."""
        return (ConfigError if _of_all(failures) else RoundFailedError)(
            f"{able} of {there} units can begin, at least {least} must (federation.min_units): "
            f"{self._each(failures)}"
        )

    def _each(self, failures: Mapping[int, Failure]) -> str:
        """Describe the causes of failures, each with the nodes that it affects."""
        whose, certified = dict[str, list[str]](), self.places.certified()
        for node, each in failures.items():
            who = self.places.of_node(node, certified)
            whose.setdefault(f"{each.kind}: {each.message}", []).append(who)
        return few_of(f"{few_of(who, ', ')}: {cause}" for cause, who in whose.items())

    def _ask(
        self,
        question: Question[T],
        contents: Mapping[int, RecordDict],
        timeout_s: float = math.inf,
        sizes: Mapping[int, Size] | None = None,
    ) -> dict[int, T | Failure]:
        """Send each node its content and return its answer, or a failure if there is no usable
        answer."""
        if not contents:
            return {}
        asked = {
            node: replace(question, size=(sizes or {}).get(node, question.size))
            for node in contents
        }
        messages = [Message(content, node, question.kind) for node, content in contents.items()]
        timeout_s = min(timeout_s, self.federation.round_timeout_s)
        reply_limit.expect(max(each.size.total_bytes for each in asked.values()))
        answers = dict[int, T | Failure]()
        for reply in self.grid.send_and_receive(messages, timeout=timeout_s):
            node = reply.metadata.src_node_id
            if node in asked:
                came = answered(reply, asked[node])
                answers[node] = came
        silence = f"no answer to {question.kind} in {timeout_s:g} s"
        silent = Failure(SILENT, f"{silence}; raise federation.round_timeout_s")
        return {node: answers.get(node, silent) for node in contents}


def _fault(unit: int, kept: Kept, check: Callable[[int, Kept], None]) -> Failure | None:
    """Return the reason why a unit's state must not be stored; None if it may be stored."""
    try:
        check(unit, kept)
    except WireError as error:
        return Failure("WireError", one_line(error))
    return None


def _groups(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split the keys into groups of at most ``_AT_ONCE``."""
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))


def _of_all(failures: Mapping[int, Failure]) -> bool:
    """Whether some unit cannot use the run's options or data."""
    return any(failure.kind in _OF_ALL for failure in failures.values())


def _apart(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """Separate the answers from the failures."""
    told = {key: each for key, each in answers.items() if not isinstance(each, Failure)}
    return told, {key: each for key, each in answers.items() if isinstance(each, Failure)}


def _connected(grid: Grid, federation: FederationSettings) -> list[int]:
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
        return Failure("ClientApp", quoted(reply.error.reason or ""))
    try:
        check_size(reply.content, question.size)
        if Failure.__name__ not in reply.content:
            return question.unpack(reply.content)
        failure = records.unpack(Failure, reply.content)
    except WireError as error:
        return Failure("WireError", one_line(error))
    named = failure.kind.isidentifier() and len(failure.kind) <= _LONGEST_KIND
    return Failure(failure.kind if named else Failure.__name__, quoted(failure.message))


def quoted(words: str) -> str:
    """Put another machine's text on one line and in quotes, so that readers see its origin."""
    return '"' + one_line(words).replace('"', "'") + '"'
