"""The units of a run as Flower's nodes: who is there, and what each is asked outside of rounds."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
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
_SILENT = "Timeout"


@dataclass
class Units:
    """Asks nodes, and judges what they answer: what one says costs nobody else.

    ``tokenizer`` is as ``Tokenizer.pack`` makes it. ``nodes`` are those of the units that have told
    their number; ``frozen_bytes`` of ``frozen`` weights went out so far.
    """

    grid: Grid
    federation: FederationSettings
    tokenizer: str
    frozen: Mapping[str, Tensors]
    nodes: dict[int, int] = field(default_factory=dict)
    frozen_bytes: int = 0
    _strangers: list[int] = field(default_factory=list)  # nodes whose number is unknown

    def __post_init__(self) -> None:
        digests = {part: digest(tensors) for part, tensors in self.frozen.items()}
        self._setup = records.pack(Setup(self.tokenizer, digests))

    def discover(self) -> tuple[ClusterState | Failure, ...]:
        """Ask each node for its cluster's state, and give it the tokeniser and the frozen parts of
        the model that it lacks; what each unit answered, in their order.

        A unit is left out, with the reason as its answer, whose node does not answer, raises, or
        answers nonsense or a number that is none or another node's: the first of two keeps it.
        Raises ``ConfigError`` where the number of nodes is not ``federation.num_units``, or where
        no unit is left and one says that it cannot use its options or data; else
        ``RoundFailedError`` where none is left.
        """
        num_units = self.federation.num_units
        self._strangers = _connected(self.grid, num_units)
        told, causes = self._introduce()
        if not told:
            for failure in causes:
                if failure.kind in (ConfigError.__name__, DataError.__name__):
                    raise ConfigError(failure.message)
            each = "; ".join(f"{failure.kind}: {failure.message}" for failure in causes)
            raise RoundFailedError(f"no unit can report its state: {each}")
        missing = [unit for unit in range(num_units) if unit not in told]
        told |= dict(zip(missing, causes, strict=True))
        return tuple(told[unit] for unit in range(num_units))

    def ask_again(self, excluded: Collection[int]) -> dict[int, ClusterState | Failure]:
        """Ask the ``excluded`` units for their clusters' states; unusable answers are left out.

        Nodes that have told no number of their own are asked, too; those that were silent are not.
        """
        known = {self.nodes[unit]: unit for unit in excluded if unit in self.nodes}
        told, _ = self._introduce() if self._strangers else ({}, [])
        for node, reply in self._states(known).items():
            if isinstance(reply, StateReply) and reply.unit == known[node]:
                told[reply.unit] = reply.state
        return told

    def kept(self) -> dict[int, Kept]:
        """What every unit keeps: its optimiser's memory and the like.

        Raises ``RoundFailedError`` or ``WireError`` where one does not tell, or what it tells makes
        a file that cannot be read.
        """
        kept = self._exchange(records.KEEP, {})
        for unit, groups in kept.items():
            for name, tensors in groups.items():
                if not name.isidentifier() or any(each.is_complex() for each in tensors.values()):
                    raise WireError(
                        f"unit {unit} keeps {name[:80]!r}, which no checkpoint can hold"
                    )
        return kept

    def restore(self, kept: Mapping[int, Kept]) -> None:
        """Let every unit go on from what it kept then, be it nothing. Raises ``RoundFailedError``
        where one cannot."""
        self._exchange(records.RESTORE, kept)

    def _introduce(self) -> tuple[dict[int, ClusterState | Failure], list[Failure]]:
        """States of the strangers that become known by it, and why the others do not."""
        answers = self._states(self._strangers)
        self._strangers = [
            node
            for node, each in answers.items()
            if not isinstance(each, Failure) or each.kind != _SILENT
        ]
        units, last = set(self.nodes), self.federation.num_units - 1
        for node, reply in answers.items():
            if isinstance(reply, Failure):
                continue
            unit, fault = reply.unit, ""
            if not 0 <= unit <= last:
                fault = f"a node reported to be unit {unit}, expected 0 … {last}"
            elif unit in units:
                fault = (
                    f"two nodes reported to be unit {unit}; each needs a partition-id of its own"
                )
            if fault:
                answers[node] = Failure("WireError", fault)
            units.add(unit)
        self._send_frozen(answers)
        told, causes = dict[int, ClusterState | Failure](), list[Failure]()
        for node, answer in answers.items():
            if isinstance(answer, Failure):
                causes.append(answer)
            else:
                self._strangers.remove(node)
                self.nodes[answer.unit], told[answer.unit] = node, answer.state
        return told, causes

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

    def _states(self, nodes: Iterable[int]) -> dict[int, StateReply | Failure]:
        return self._ask(records.STATE, dict.fromkeys(nodes, self._setup), records.unpack_state)

    def _exchange(self, kind: str, groups: Mapping[int, Kept]) -> dict[int, Kept]:
        """Send each unit its groups of tensors; what each answers."""
        contents = {
            node: records.pack_groups(groups.get(unit, {})) for unit, node in self.nodes.items()
        }
        answers, came = self._ask(kind, contents, records.unpack_groups), dict[int, Kept]()
        for unit, node in self.nodes.items():
            answer = answers[node]
            if isinstance(answer, Failure):
                raise RoundFailedError(f"unit {unit}: {answer.message}")
            came[unit] = answer
        return came

    def _ask(
        self, kind: str, contents: Mapping[int, RecordDict], unpack: Callable[[RecordDict], T]
    ) -> dict[int, T | Failure]:
        """Each node's answer to its content; a failure where it cannot be used, or none came."""
        messages = [Message(content, node, kind) for node, content in contents.items()]
        timeout_s = self.federation.round_timeout_s
        replies = self.grid.send_and_receive(messages, timeout=timeout_s)
        answers = {reply.metadata.src_node_id: answered(reply, unpack) for reply in replies}
        limit = f"federation.round_timeout_s={timeout_s:g}"
        silence = Failure(_SILENT, f"no answer to {kind} within {limit}; raise it")
        return {node: answers.get(node, silence) for node in contents}


def _connected(grid: Grid, wanted: int) -> list[int]:
    deadline = time.monotonic() + _WAIT_S
    while len(nodes := list(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if len(nodes) != wanted:
        raise ConfigError(
            f"{len(nodes)} nodes are connected, federation.num_units={wanted}; start with "
            f"--federation-config 'num-supernodes={wanted}' or set federation.num_units"
        )
    return nodes


def answered(reply: Message, unpack: Callable[[RecordDict], T]) -> T | Failure:
    """What a node answered; whatever cannot be used is a failure, told in one printable line."""
    if reply.has_error():
        return Failure("ClientApp", one_line(reply.error.reason))
    try:
        if Failure.__name__ not in reply.content:
            return unpack(reply.content)
        failure = records.unpack(Failure, reply.content)
    except WireError as error:
        failure = Failure("WireError", str(error))
    return Failure(one_line(failure.kind), one_line(failure.message))
