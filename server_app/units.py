"""The units of a run as Flower's nodes: find them, and ask them questions outside of rounds."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.config import Settings
from collapipe.config.resolved import Resolved
from collapipe.flower.reply_limit import expect
from collapipe.state import ClusterState
from collapipe.tasks.task import Task
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.messages import (
    EvaluateReply,
    Failure,
    RowsReply,
    RowsRequest,
    Setup,
    StateReply,
)
from server_app import questions
from server_app.exclusions import concern_all, too_few, unfit_labels, warn_excluded
from server_app.places import Places
from server_app.questions import Asked, answered, apart, connected, groups_of
from server_app.roster import ABSENT, NOT_ASKED, SILENT, Pause, Reported, Roster, Silences

Kept = dict[str, Tensors]  # the state that a unit keeps between rounds: group → tensors
T = TypeVar("T")
_AGAIN_S = 60.0  # timeout of a new node or an excluded unit
SUSPENDED = Failure(NOT_ASKED, "did not answer the last time it was asked")
_MISSED = Failure(NOT_ASKED, "missed the last round")


@dataclass
class Units:
    """Asks nodes ``questions`` and checks the replies; a bad reply affects only its sender."""

    grid: Grid
    settings: Settings  # the run's options, which each unit receives in its first message
    tokenizer: str = ""  # as ``Tokenizer.pack`` makes it; only ``rows`` works without it
    # frozen weights of each part of the model; read when a unit lacks the part
    frozen: Mapping[str, Tensors] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # of the frozen parts that units hold
    # which unit each node is; remembers the places of units with names
    places: Places = field(default_factory=Places)
    nodes: dict[int, int] = field(default_factory=dict)  # the node of each known unit
    bytes_down: int = 0  # of frozen weights and restored states that were sent
    arrived: dict[int, int] = field(default_factory=dict)  # each unit's last round with a reply
    # when silent units are asked for the states that they keep
    at_checkpoints: Silences = field(default_factory=Silences)
    saved: Mapping[int, Kept] = field(default_factory=dict)  # states of a resumed run, by unit
    unrestored: set[int] = field(default_factory=set)  # units that must still be restored
    _strangers: list[int] = field(default_factory=list)  # nodes without a known unit
    _calls: dict[int, Pause] = field(default_factory=dict)  # when strangers are asked, by node
    _at_evaluations: Silences = field(default_factory=Silences)
    _met: set[int] = field(default_factory=set)  # nodes that are no longer new

    def __post_init__(self) -> None:
        self.setup = Setup(_for_units(self.settings), self.tokenizer, self.digests)

    def rows(self, words: bool = True, task: Task | None = None) -> dict[int, RowsReply]:
        """Ask each unit for a summary of its training rows, with ``words`` if the run has no
        tokeniser yet. A unit is excluded and logged if its reply is unusable or has labels that the
        ``task`` does not allow.

        Raises ``ConfigError`` if there are too few or too many nodes. If too few units remain, see
        ``federation.min_units``, raises ``ConfigError`` if some cannot use the run's options or
        data, else ``RoundFailedError``.
        """
        nodes = connected(self.grid, self.settings)
        request = records.pack(RowsRequest(self.setup.settings, words))
        answers = self._ask(dict.fromkeys(nodes, (questions.rows(words), request)))
        self.places.claim_all(answers, self.settings.federation.num_units, set())
        replies, failures = apart(answers)
        unfit = {} if task is None else unfit_labels(replies, task)
        failures |= unfit
        replies = {node: reply for node, reply in replies.items() if node not in unfit}
        self.places.failed.update(failures)
        self.places.barred.update(unfit)
        # Without certificates, all units share the options and data, so all must have rows.
        whole = self.places.signed is None and concern_all(failures)
        least = self.settings.federation.min_units or (len(nodes) if whole else 1)
        if len(replies) < least:
            raise too_few(self.places, len(replies), len(nodes), least, failures)
        warn_excluded(self.places, failures)
        return dict(sorted((reply.unit, reply) for reply in replies.values()))

    def discover(self) -> tuple[Reported, ...]:
        """Ask each node for its cluster's state, and send it the tokeniser and the frozen parts of
        the model that it lacks. Returns each unit's state or failure, in the units' order.

        A unit's failure excludes it: its node did not answer, raised an error, or sent a malformed
        reply, or its number or name is taken or out of range. Nodes without a usable reply on
        their rows are not asked here: ``ask_again`` asks them.

        Raises as ``rows`` does, but without ``federation.min_units`` only if no unit remains.
        """
        num_units, failed = self.settings.federation.num_units, self.places.failed
        nodes = connected(self.grid, self.settings)
        reported, failures = self._introduce([node for node in nodes if node not in failed], ())
        later = {node: each for node, each in failed.items() if node in nodes}
        self._met.update(later)
        self._strangers += later.keys() - self.places.barred
        failures = {**later, **failures}
        silent = [node for node, failure in failures.items() if failure.kind == SILENT]
        self._calls |= dict.fromkeys(silent, Pause().longer(1))
        least = self.settings.federation.min_units or 1
        if len(reported) < least:
            raise too_few(self.places, len(reported), len(nodes), least, failures)
        certified = self.places.certified()
        places = {node: self.places.place(node, certified) for node in failures}
        known = {places[node]: failure for node, failure in failures.items()}
        others = [failure for node, failure in failures.items() if places[node] is None]
        for unit in sorted({*range(num_units)} - reported.keys()):
            absent = others.pop(0) if others else Failure(ABSENT, "no node has this number")
            reported[unit] = known.get(unit, absent)
        return tuple(reported[unit] for unit in range(num_units))

    def ask_again(self, round_: int, roster: Roster) -> tuple[dict[int, Reported], set[int]]:
        """Ask excluded units that are due, new nodes, and nodes without a usable reply so far for
        their clusters' states.

        Returns the usable states and the failures of excluded units' new nodes, and the known units
        that sent nothing usable. A new node may take the number of a node that has left, for
        example after a restart of its machine. A node that fails is asked after pauses that grow.
        """
        online = set(self.grid.get_node_ids())
        self._met &= online
        new = online - self._met - {*self.nodes.values()}
        self._strangers = [node for node in self._strangers if node in online and node not in new]
        self._strangers += sorted(new)
        offline = {unit for unit, node in self.nodes.items() if node not in online}
        calls = {node: self._calls.pop(node, Pause()) for node in self._strangers}
        asked = [node for node, pause in calls.items() if round_ >= pause.until]
        reported, failures = self._introduce(asked, offline, _AGAIN_S)
        self._calls |= {node: pause for node, pause in calls.items() if node not in asked}
        self._calls |= {node: calls[node].longer(round_) for node in failures}
        certified = self.places.certified() if failures else {}
        failed = {self.places.place(node, certified): each for node, each in failures.items()}
        warn_excluded(self.places, {node: failures[node] for node in new & failures.keys()})
        due = {*roster.due(round_)} - reported.keys() - offline
        known = due & self.nodes.keys()
        answers = self._states_of(known)
        self._restore_late(answers)
        reported |= {reply.unit: reply.state for reply in apart(answers)[0].values()}
        silent = known - reported.keys()
        reported |= {unit: failed[unit] for unit in roster.excluded if unit in failed}
        return reported, silent

    def states(self, units: Iterable[int]) -> dict[int, Reported]:
        """Ask these units for their current states. Unusable answers are omitted."""
        answers = self._states_of(unit for unit in units if unit in self.nodes)
        return {reply.unit: reply.state for reply in apart(answers)[0].values()}

    def evaluate(
        self, contents: Mapping[int, RecordDict], num_labels: int, absent: Collection[int]
    ) -> dict[int, EvaluateReply | Failure]:
        """Send each of these units a model to evaluate, and return their replies.

        ``num_labels`` is the run's number of labels. Units that are ``absent``, or that
        ``Silences`` suspends, are not asked.
        """
        there = contents.keys() - absent
        asked, question = self._at_evaluations.due(there), questions.evaluate(num_labels)
        answers = self.ask({u: (question, each) for u, each in contents.items() if u in asked})
        for unit, answer in answers.items():
            self._at_evaluations.note(unit, answer)
        others = {unit: SUSPENDED if unit in there else _MISSED for unit in contents.keys() - asked}
        return {**others, **answers}

    def ask(
        self, asked: Mapping[int, Asked[T]], timeout_s: float = math.inf
    ) -> dict[int, T | Failure]:
        """Send each unit its message and return its answer, or a failure if there is no usable
        answer."""
        of_nodes = {self.nodes[unit]: each for unit, each in asked.items()}
        answers = self._ask(of_nodes, timeout_s)
        return {unit: answers[self.nodes[unit]] for unit in asked}

    def restoring(self, unit: int) -> Asked[dict[str, Tensors]]:
        """Build a unit's ``restore`` question, and count its bytes."""
        groups = self.saved.get(unit, {})
        self.bytes_down += sum(map(records.num_bytes, groups.values()))
        return questions.RESTORE, records.pack_groups(groups)

    def _states_of(self, units: Iterable[int]) -> dict[int, StateReply | Failure]:
        """Ask the nodes of these units for their states. Returns the usable answers by node."""
        known = {self.nodes[unit]: unit for unit in units}
        return {
            node: reply
            for node, reply in self._states(known, known, _AGAIN_S).items()
            if isinstance(reply, StateReply) and reply.unit == known[node]
        }

    def _introduce(
        self, nodes: Collection[int], offline: Collection[int], timeout_s: float = math.inf
    ) -> tuple[dict[int, Reported], dict[int, Failure]]:
        """Ask ``nodes`` for their states and make them known units. Returns the states by unit, and
        the failures by node. The places of the units that are ``offline`` are free."""
        if not nodes:
            return {}, {}
        answers = self._states(nodes, {}, timeout_s)
        self._met.update(answers)
        taken = self.nodes.keys() - set(offline)
        self.places.claim_all(answers, self.settings.federation.num_units, taken)
        self._send_places(answers)
        self._send_frozen(answers)
        self._restore_late(answers)
        replies, failures = apart(answers)
        self.nodes |= {answer.unit: node for node, answer in replies.items()}
        self._strangers = [node for node in self._strangers if node not in replies]
        self._strangers += [node for node in failures if node not in self._strangers]
        return {answer.unit: answer.state for answer in replies.values()}, failures

    def _send_places(self, answers: dict[int, StateReply | Failure]) -> None:
        """Send nodes that reported a wrong unit number their correct number, and ask them again,
        because devices, for example, are drawn by the unit's number."""
        moved = {
            node: reply.unit
            for node, reply in apart(answers)[0].items()
            if isinstance(reply.state, ClusterState) and reply.state.unit != reply.unit
        }
        for node, reply in self._states(moved, moved).items():
            answers[node] = reply
            if isinstance(reply, StateReply) and reply.unit != moved[node]:
                fault = f"reported to be unit {reply.unit}, is {moved[node]}"
                answers[node] = Failure("WireError", fault)

    def _send_frozen(self, answers: dict[int, StateReply | Failure]) -> None:
        """Send each node the parts that it lacks; those that cannot store them become failures."""
        for part in self.digests:  # one at a time: a part may fill the memory
            replies, _ = apart(answers)
            nodes = [node for node, reply in replies.items() if part in reply.lacking]
            if not nodes:
                continue
            tensors = self.frozen[part]
            content = records.pack_groups({part: tensors})
            done = self._ask(dict.fromkeys(nodes, (questions.FROZEN, content)))
            answers |= {node: each for node, each in done.items() if isinstance(each, Failure)}
            self.bytes_down += len(nodes) * records.num_bytes(tensors)

    def _restore_late(self, answers: dict[int, StateReply | Failure]) -> None:
        """Restore the states of units that answer only now. Failures replace their ``answers``."""
        replies, _ = apart(answers)
        back = {
            node: reply.unit for node, reply in replies.items() if reply.unit in self.unrestored
        }
        for group in groups_of([*back]):
            asked = {node: self.restoring(back[node]) for node in group}
            for node, done in self._ask(asked).items():
                if isinstance(done, Failure):
                    answers[node] = done
                else:
                    self.unrestored.remove(back[node])

    def _states(
        self, nodes: Iterable[int], known: Mapping[int, int], timeout_s: float = math.inf
    ) -> dict[int, StateReply | Failure]:
        """Ask ``nodes`` for their states. Nodes that are ``known`` receive their unit's number."""
        general = records.pack(self.setup)
        contents = {
            node: records.pack(replace(self.setup, unit=known[node])) if node in known else general
            for node in nodes
        }
        return self._ask({n: (questions.STATE, each) for n, each in contents.items()}, timeout_s)

    def _ask(
        self, asked: Mapping[int, Asked[T]], timeout_s: float = math.inf
    ) -> dict[int, T | Failure]:
        """As ``ask``, by node, and no longer than a round."""
        if not asked:
            return {}
        timeout_s = min(timeout_s, self.settings.federation.round_timeout_s)
        messages, answers = list[Message](), dict[int, T | Failure]()
        for node, (question, content) in asked.items():
            messages.append(Message(content, node, question.kind))
            silence = f"no answer to {question.kind} in {timeout_s:g} s"
            answers[node] = Failure(SILENT, f"{silence}; raise federation.round_timeout_s")
        expect(max(question.size.total_bytes for question, _ in asked.values()))
        for reply in self.grid.send_and_receive(messages, timeout=timeout_s):
            node = reply.metadata.src_node_id
            if node in asked:
                answer = answered(reply, asked[node][0])
                answers[node] = answer
        return answers


def _for_units(settings: Settings) -> str:
    """Return the options that units receive. Units on other machines receive nothing of the
    server's folders, command line and tracking."""
    if settings.runtime.name != "deployment":
        return settings.text  # the server and its units then read rows once
    runtime = {**settings.tree["runtime"], "federation": ""}
    return Resolved(tree={**settings.tree, "runtime": runtime, "tracking": {"mlflow": None}}).text
