"""The units of a run as Flower's nodes: who is there, and what each is asked outside of rounds."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

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
from server_app.attendance import ABSENT, NOT_ASKED, SILENT, Attendance, Silences
from server_app.labels import unfit_labels
from server_app.places import Places
from server_app.pulling import UNUSABLE
from server_app.questions import Question, Size, check_size

Kept = dict[str, Tensors]  # what a unit keeps between rounds, by its names of it
T = TypeVar("T")
Numbered = TypeVar("Numbered", RowsReply, StateReply)
_log = logging.getLogger(__name__)
_POLL_S = 0.5
_AGAIN_S = 60.0  # for a node that comes, or a unit that was left out, to answer
_AT_ONCE = 8  # units whose states between rounds are in memory together
_LONGEST_KIND = 64  # characters of an error's name
_BY_THE_LAST = "the checkpoint has what it kept by the one before"
_RESTS = Failure(NOT_ASKED, "was silent when it was asked last")
_MISSED = Failure(NOT_ASKED, "missed the last round")
_GONE = "has left, or its machine cannot be reached"
_UNAVAILABLE = 3, 4, 5  # Flower's codes of errors of a node that is gone
_OF_ALL = ConfigError.__name__, DataError.__name__  # what all units have in common is wrong


@dataclass
class Units:
    """Asks nodes ``questions``, and judges the replies: a bad one costs its sender alone.

    ``tokenizer`` is as ``Tokenizer.pack`` makes it; ``rows`` alone can do without. ``places`` says
    which unit a node is, and remembers those with names. ``nodes`` are those of the units that are
    known by now; ``bytes_down`` are those of ``frozen`` weights that were sent and of states that
    were restored. ``arrived`` is the last round of which each unit's answer came.
    """

    grid: Grid
    federation: FederationSettings
    tokenizer: str = ""
    frozen: Mapping[str, Tensors] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    nodes: dict[int, int] = field(default_factory=dict)
    bytes_down: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    _strangers: list[int] = field(default_factory=list)  # nodes of units that are unknown
    _calls: Attendance = field(default_factory=lambda: Attendance(1))  # of strangers, by node
    _at_checkpoints: Silences = field(default_factory=Silences)
    _at_evaluations: Silences = field(default_factory=Silences)
    _kept: Mapping[int, Kept] = field(default_factory=dict)  # of the run that goes on
    _owed: set[int] = field(default_factory=set)  # units that are yet to be restored
    _met: set[int] = field(default_factory=set)  # nodes that were asked, or need not be

    def __post_init__(self) -> None:
        self.attendance = Attendance(self.federation.miss_limit)
        digests = {part: digest(tensors) for part, tensors in self.frozen.items()}
        self._setup = Setup(self.tokenizer, digests)

    def rows(self, words: bool = True, task: Task | None = None) -> dict[int, RowsReply]:
        """What each unit reports of its training rows, with ``words`` if the run has no tokeniser
        yet. A unit that sends nothing usable, or labels that the ``task`` does not allow, is left
        out and named.

        Raises ``ConfigError`` if there are too few nodes or too many, or if fewer units than
        ``federation.min_units`` are left and some cannot use the run's options or data, else
        ``RoundFailedError``.
        """
        nodes = _connected(self.grid, self.federation)
        request = records.pack(RowsRequest(words))
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

    def discover(self) -> tuple[ClusterState | Failure, ...]:
        """Ask each node for its cluster's state, and give it the tokeniser and the frozen parts of
        the model that it lacks; what each unit answered, in their order.

        Nodes that sent no usable reply on their rows are not asked here: ``ask_again`` asks them. A
        unit is left out, with the reason as its answer, if its node does not answer, raises, or
        sends a malformed reply, or a number or name that is another's or out of range.
        Raises ``ConfigError`` if there are too few nodes or too many, or if no unit is left and one
        says that it cannot use its options or data; else ``RoundFailedError`` if none is left.
        """
        num_units, failed = self.federation.num_units, self.places.failed
        nodes = _connected(self.grid, self.federation)
        told, failures = self._introduce([node for node in nodes if node not in failed], ())
        later = {node: each for node, each in failed.items() if node in nodes}
        self._met.update(later)
        self._strangers += later.keys() - self.places.barred
        for node, failure in {**later, **failures}.items():
            if failure.kind == SILENT:
                self._calls.asked(node, 1, answered=False)
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

    def ask_again(
        self, round_: int, excluded: Collection[int]
    ) -> dict[int, ClusterState | Failure]:
        """Ask the ``excluded`` units that are due for their clusters' states, and nodes that have
        come, or have sent nothing usable yet; unusable answers are left out.

        A node that comes may take the number of one that is gone: a box that was started anew.
        """
        online = set(self.grid.get_node_ids())
        self._met &= online
        came = online - self._met - {*self.nodes.values()}
        self._strangers = [node for node in self._strangers if node in online and node not in came]
        self._strangers += sorted(came)
        gone = {unit for unit, node in self.nodes.items() if node not in online}
        asked = [node for node in self._strangers if self._calls.due(node, round_)]
        told, failures = self._introduce(asked, gone, _AGAIN_S)
        for node in asked:
            answered = node not in failures or failures[node].kind != SILENT
            self._calls.asked(node, round_, answered)
        self._warn_left_out({node: failures[node] for node in came & failures.keys()})
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

    def evaluate(
        self, contents: Mapping[int, RecordDict], num_labels: int
    ) -> dict[int, EvaluateReply | Failure]:
        """Send each of these units a model; what each reports of it, in a run of so many labels.
        Not asked are those that missed the last round, or rest by ``Silences``."""
        there = {unit for unit in contents if not self.attendance.missed(unit)}
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
        """Each unit's answer to its content; a failure if it cannot be used, or none came.
        ``sizes`` are those of the units' largest replies, if they differ from the question's."""
        of_nodes = {self.nodes[unit]: content for unit, content in contents.items()}
        most = {self.nodes[unit]: size for unit, size in (sizes or {}).items()}
        answers = self._ask(question, of_nodes, timeout_s, most)
        return {unit: answers[self.nodes[unit]] for unit in contents}

    def kept(
        self,
        excluded: Collection[int],
        most: Callable[[int], Mapping[str, int]],
        check: Callable[[int, Kept], None],
    ) -> Iterator[tuple[int, Kept | Failure]]:
        """Ask each unit, except the ``excluded`` ones and those that missed the last round, for its
        state between rounds, such as its optimiser's moments. Yield the states as they arrive, few
        of which are in memory together.

        A failure stands for the state of a unit that sends none, or one for which ``check`` raises
        ``WireError``; the log names it. ``most`` returns the bytes of each group that a unit may
        keep. A unit that was silent before is asked less often, see ``Silences``.
        """

        def request(unit: int) -> RecordDict:
            return records.pack(KeepRequest(self.arrived.get(unit, 0)))

        def size(unit: int) -> Size:
            return questions.keep(most(unit)).size

        missed = {unit for unit in self.nodes if self.attendance.missed(unit)}
        units = self.nodes.keys() - missed - set(excluded)
        asked = self._at_checkpoints.due(units)
        self._warn(_BY_THE_LAST, dict.fromkeys(sorted(units - asked), _RESTS))
        for unit, answer in self._ask_in_turn(questions.keep({}), asked, request, size):
            self._at_checkpoints.note(unit, answer)
            failure = answer if isinstance(answer, Failure) else _fault(unit, answer, check)
            if failure is not None:
                self._warn(_BY_THE_LAST, {unit: failure})
            yield unit, failure or answer

    def restore(self, kept: Mapping[int, Kept]) -> dict[int, Failure]:
        """Send each unit the state that it had at the checkpoint, which may be none. A unit that is
        missing or fails gets it when it answers again. Return why each failed; the log says so.

        ``kept`` may read a unit's state from a disk when it is asked for it, also in later rounds.
        Raises ``RoundFailedError`` if every unit fails.
        """
        self._kept, self._owed = kept, kept.keys() | self.nodes.keys()
        failures, question = dict[int, Failure](), questions.restore()
        for unit, answer in self._ask_in_turn(question, self.nodes.keys(), self._state_of):
            if isinstance(answer, Failure):
                failures[unit] = answer
            else:
                self._owed.remove(unit)
        if len(failures) == len(self.nodes):
            causes = {self.nodes[unit]: failure for unit, failure in failures.items()}
            raise RoundFailedError(f"no unit goes on: {self._each(causes)}")
        self._warn("it goes on when it answers again", failures)
        return failures

    def _states_of(self, units: Iterable[int]) -> dict[int, StateReply | Failure]:
        """What the nodes of these units answer, by nodes; unusable answers are left out."""
        known = {self.nodes[unit]: unit for unit in units}
        return {
            node: reply
            for node, reply in self._states(known, known, _AGAIN_S).items()
            if isinstance(reply, StateReply) and reply.unit == known[node]
        }

    def _state_of(self, unit: int) -> RecordDict:
        """A ``restore`` message, which is counted."""
        groups = self._kept.get(unit, {})
        self.bytes_down += sum(map(records.num_bytes, groups.values()))
        return records.pack_groups(groups)

    def _ask_in_turn(
        self,
        question: Question[T],
        units: Collection[int],
        content: Callable[[int], RecordDict],
        size: Callable[[int], Size] | None = None,
    ) -> Iterator[tuple[int, T | Failure]]:
        """As ``ask``, a few units at a time, so that memory has the messages of these alone.

        All together take two timeouts at most: units that have missed rounds come last, and the
        others need not wait for more than one that is silent.
        """
        timeout_s = self.federation.round_timeout_s
        deadline = time.monotonic() + 2 * timeout_s
        order = sorted(units, key=lambda unit: (self.attendance.misses(unit), unit))
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
    ) -> tuple[dict[int, ClusterState | Failure], dict[int, Failure]]:
        """States of the ``nodes`` that become known units, and why others do not, by node; the
        places of the units that are ``gone`` are free."""
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
        """Let each answer be of the unit whose place the node has, and make a failure of it if it
        has none; those of other nodes are ``taken``. Names that have places come first."""
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
            done = self._ask(questions.frozen(), contents)
            answers |= {node: each for node, each in done.items() if isinstance(each, Failure)}
            self.bytes_down += len(contents) * records.num_bytes(tensors)

    def _send_owed(self, answers: dict[int, StateReply | Failure]) -> None:
        """Let units that answer only now go on from what they kept; as ``_send_frozen``."""
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
        """What nodes answer; those that are ``known`` are told which unit they are."""
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
            _log.warning("%s is left out: %s: %s", who, failure.kind, failure.message)

    def _least(self, there: int, failures: Mapping[int, Failure]) -> int:
        """How many units must have rows.

        Without ``federation.min_units`` one is enough, unless some cannot use their options or data
        and no unit has a certificate: then these are the run's own, and all units must.
        """
        own = self.places.signed is None and _of_all(failures)
        return self.federation.min_units or (there if own else 1)

    def _too_few(
        self, able: int, there: int, least: int, failures: Mapping[int, Failure]
    ) -> CollaPipeError:
        """The error of a run in which ``able`` units can begin, and ``least`` must."""
        return (ConfigError if _of_all(failures) else RoundFailedError)(
            f"{able} of {there} units can begin, at least {least} must (federation.min_units): "
            f"{self._each(failures)}"
        )

    def _each(self, failures: Mapping[int, Failure]) -> str:
        """Causes of nodes' failures, and whose they are."""
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
        """Each node's answer to its content; a failure if it cannot be used, or none came."""
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
    """Why a unit's state is not stored; None if it is."""
    try:
        check(unit, kept)
    except WireError as error:
        return Failure("WireError", one_line(error))
    return None


def _groups(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    """As many as are asked at once."""
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))


def _of_all(failures: Mapping[int, Failure]) -> bool:
    """Whether some unit cannot use the run's options or data."""
    return any(failure.kind in _OF_ALL for failure in failures.values())


def _apart(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """The answers, and why others have none."""
    told = {key: each for key, each in answers.items() if not isinstance(each, Failure)}
    return told, {key: each for key, each in answers.items() if isinstance(each, Failure)}


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


def answered(reply: Message, question: Question[T]) -> T | Failure:
    """What a node answered, measured before it is parsed; a failure if it cannot be used. What the
    unit itself says of a failure is in quotes."""
    if reply.has_error() and reply.error.code == UNUSABLE:
        return Failure("WireError", one_line(reply.error.reason))
    if reply.has_error():
        if reply.error.code in _UNAVAILABLE:  # Flower speaks of heartbeats, also after a goodbye
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
    """Another machine's words in one line and in quotes, so that they read as nobody else's."""
    return '"' + one_line(words).replace('"', "'") + '"'
