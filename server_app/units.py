"""The units of a run as Flower's nodes: who is there, and what each is asked outside of rounds."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.errors import ConfigError, DataError, RoundFailedError, WireError, one_line
from collapipe.sections import FederationSettings
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.frozen_store import digest
from collapipe.wire.messages import Failure, Setup, StateReply

Kept = dict[str, Tensors]  # what a unit keeps between rounds, by its names of it
T = TypeVar("T")
_WAIT_S = 30.0  # for simulated or deployed nodes to connect
_POLL_S = 0.5


class Units:
    """Asks nodes, and judges what they answer: what one says costs nobody else.

    Attributes
    ----------
    nodes
        Unit → its node, of those that have told their number.
    frozen_bytes
        Of frozen weights that went out so far.
    """

    def __init__(
        self,
        grid: Grid,
        federation: FederationSettings,
        tokenizer: str,
        frozen: Mapping[str, Tensors],
    ) -> None:
        self._grid, self._federation, self._frozen = grid, federation, frozen
        self._setup = Setup(tokenizer, {part: digest(each) for part, each in frozen.items()})
        self._strangers: list[int] = []  # nodes whose number is unknown
        self.nodes: dict[int, int] = {}
        self.frozen_bytes = 0

    def discover(self) -> tuple[ClusterState | Failure, ...]:
        """Ask each node for its cluster's state, and give it the tokeniser and the frozen parts of
        the model that it lacks; what each unit answered, in their order.

        A unit is left out, with the reason as its answer, whose node does not answer, raises, or
        answers nonsense or a number that is none or another node's: the first of two keeps it.

        Raises
        ------
        ConfigError
            Where the number of nodes is not ``federation.num_units``, or a unit says that it cannot
            use its options or data.
        RoundFailedError
            Where no unit is left.
        """
        num_units = self._federation.num_units
        self._strangers = _connected(self._grid, num_units)
        told, causes = self._introduce()
        for failure in causes:
            if failure.kind in (ConfigError.__name__, DataError.__name__):
                raise ConfigError(failure.message)
        if not told:
            each = "; ".join(f"{failure.kind}: {failure.message}" for failure in causes)
            raise RoundFailedError(f"no unit can report its state: {each}")
        missing = [unit for unit in range(num_units) if unit not in told]
        told |= dict(zip(missing, causes, strict=True))
        return tuple(told[unit] for unit in range(num_units))

    def ask_again(self, excluded: Collection[int]) -> dict[int, ClusterState | Failure]:
        """What the ``excluded`` units say of their clusters now; who answers nonsense is not in it.

        Nodes that have told no number of their own are asked, too; those that were silent are not.
        """
        known = {self.nodes[unit]: unit for unit in excluded if unit in self.nodes}
        told, _ = self._introduce() if self._strangers else ({}, [])
        for node, reply in self._states(known).items():
            if isinstance(reply, StateReply) and reply.unit == known[node]:
                told[reply.unit] = reply.state
        return told

    def kept(self) -> dict[int, Kept]:
        """Of every unit, its optimiser's memory and the like.

        Raises ``RoundFailedError`` or ``WireError`` where one does not tell.
        """
        contents = {node: records.pack_groups({}) for node in self.nodes.values()}
        kept = self._asked(contents, records.KEEP, records.unpack_groups)
        for unit, named in kept.items():
            _check_can_be_written(unit, named)
        return kept

    def restore(self, kept: Mapping[int, Kept]) -> None:
        """Every unit goes on from what it kept then, be it nothing.

        Raises ``RoundFailedError`` where one cannot.
        """
        contents = {
            node: records.pack_groups(kept.get(unit, {})) for unit, node in self.nodes.items()
        }
        self._asked(contents, records.RESTORE, records.unpack_groups)

    def _introduce(self) -> tuple[dict[int, ClusterState | Failure], list[Failure]]:
        """States of the strangers that become known by it, and why the others do not."""
        replies = self._states(self._strangers)
        outcomes = {
            node: replies.get(node, self._silence(records.STATE)) for node in self._strangers
        }
        self._strangers = [node for node in self._strangers if node in replies]
        known = dict[int, StateReply]()
        for node, reply in outcomes.items():
            outcomes[node] = self._with_own_number(reply, known.values())
            if isinstance(outcome := outcomes[node], StateReply):
                known[node] = outcome
        outcomes |= self._send_frozen(known)
        told, causes = dict[int, ClusterState | Failure](), list[Failure]()
        for node, outcome in outcomes.items():
            if isinstance(outcome, Failure):
                causes.append(outcome)
            else:
                self._strangers.remove(node)
                self.nodes[outcome.unit], told[outcome.unit] = node, outcome.state
        return told, causes

    def _states(self, nodes: Iterable[int]) -> dict[int, StateReply | Failure]:
        content = records.pack(self._setup)
        replies = self._send(dict.fromkeys(nodes, content), records.STATE)
        return {node: _answer(reply, records.unpack_state) for node, reply in replies.items()}

    def _with_own_number(
        self, reply: StateReply | Failure, others: Collection[StateReply]
    ) -> StateReply | Failure:
        """A failure in place of a reply with a number that is none, or another node's."""
        if isinstance(reply, Failure):
            return reply
        unit, last = reply.unit, self._federation.num_units - 1
        if not 0 <= unit <= last:
            return Failure("WireError", f"a node reported to be unit {unit}, expected 0 … {last}")
        if unit in self.nodes or unit in (other.unit for other in others):
            cause = f"two nodes reported to be unit {unit}; each needs a partition-id of its own"
            return Failure("WireError", cause)
        return reply

    def _send_frozen(self, known: Mapping[int, StateReply]) -> dict[int, Failure]:
        """Send each node what it lacks; the nodes that cannot keep it, and why."""
        failures = dict[int, Failure]()
        for part, tensors in self._frozen.items():  # one at a time: it may be as large as a memory
            content = records.pack_groups({part: tensors})
            nodes = [node for node, reply in known.items() if part in reply.lacking]
            replies = self._send(dict.fromkeys(nodes, content), records.FROZEN)
            for node in nodes:
                done = self._answer_of(node, replies, records.FROZEN, records.unpack_groups)
                if isinstance(done, Failure):
                    failures[node] = done
            self.frozen_bytes += len(nodes) * records.num_bytes(tensors)
        return failures

    def _asked(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        unpack: Callable[[RecordDict], T | Failure],
    ) -> dict[int, T]:
        """Every unit's answer. Raises ``RoundFailedError`` where one has none."""
        replies, answers = self._send(contents, kind), dict[int, T]()
        for unit, node in self.nodes.items():
            answer = self._answer_of(node, replies, kind, unpack)
            if isinstance(answer, Failure):
                raise RoundFailedError(f"unit {unit}: {answer.message}")
            answers[unit] = answer
        return answers

    def _answer_of(
        self,
        node: int,
        replies: Mapping[int, Message],
        kind: str,
        unpack: Callable[[RecordDict], T | Failure],
    ) -> T | Failure:
        return _answer(replies[node], unpack) if node in replies else self._silence(kind)

    def _send(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Message]:
        messages = [Message(content, node, kind) for node, content in contents.items()]
        replies = self._grid.send_and_receive(messages, timeout=self._federation.round_timeout_s)
        return {reply.metadata.src_node_id: reply for reply in replies}

    def _silence(self, kind: str) -> Failure:
        limit = f"federation.round_timeout_s={self._federation.round_timeout_s:g}"
        return Failure("Timeout", f"no answer to {kind} within {limit}; raise it")


def _connected(grid: Grid, wanted: int) -> list[int]:
    deadline = time.monotonic() + _WAIT_S
    nodes = list(grid.get_node_ids())
    while len(nodes) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        nodes = list(grid.get_node_ids())
    if len(nodes) != wanted:
        raise ConfigError(
            f"{len(nodes)} nodes are connected, federation.num_units={wanted}; start with "
            f"--federation-config 'num-supernodes={wanted}' or set federation.num_units"
        )
    return nodes


def _answer(reply: Message, unpack: Callable[[RecordDict], T | Failure]) -> T | Failure:
    """What a node answered; whatever cannot be used is a failure, told in one printable line."""
    if reply.has_error():
        return Failure("ClientApp", one_line(reply.error.reason))
    try:
        answer = unpack(reply.content)
    except WireError as error:
        return Failure("WireError", one_line(error))
    if isinstance(answer, Failure):
        return Failure(one_line(answer.kind), one_line(answer.message))
    return answer


def _check_can_be_written(unit: int, kept: Kept) -> None:
    """What a unit sends must not make a file that cannot be read."""
    for name, tensors in kept.items():
        odd = [of for of, tensor in tensors.items() if tensor.is_complex()]
        if not name.isidentifier() or odd:
            raise WireError(f"unit {unit} keeps {name[:80]!r}, which no checkpoint can hold")
