"""Which nodes there are, and what their clusters are like."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe.errors import ConfigError, RoundFailedError, WireError, one_line
from collapipe.sections import FederationSettings
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.frozen_store import digest
from collapipe.wire.messages import Failure, Setup, StateReply

T = TypeVar("T")
_WAIT_S = 30.0  # for simulated or deployed nodes to connect
_POLL_S = 0.5


@dataclass(frozen=True)
class Discovery:
    """Who is there.

    Attributes
    ----------
    setup
        What the nodes were told.
    units
        Which unit each node is.
    reported
        What the units told of their clusters, in their order.
    frozen_bytes
        Of frozen weights that went out.
    """

    setup: Setup
    units: dict[int, int]
    reported: tuple[ClusterState | Failure, ...]
    frozen_bytes: int


def discover(
    grid: Grid, federation: FederationSettings, tokenizer: str, frozen: Mapping[str, Tensors]
) -> Discovery:
    """Ask each node for its cluster's state, and give it the tokeniser and those of the ``frozen``
    parts of the model that it lacks. A unit whose state is nonsense is none the less there.

    Raises
    ------
    ConfigError
        Where the number of nodes is not ``federation.num_units``, or a unit's data cannot be used.
    RoundFailedError
        Where a unit cannot tell its state.
    """
    nodes = _nodes(grid, federation.num_units)
    digests = {part: digest(tensors) for part, tensors in frozen.items()}
    setup = Setup(tokenizer, digests)
    told = _states(grid, federation, nodes, setup)
    units = sorted(reply.unit for reply in told.values())
    if units != list(range(federation.num_units)):
        raise RoundFailedError(
            f"units {units} told their state, expected 0 … {federation.num_units - 1}; "
            "each node needs a partition-id of its own"
        )
    lacking = {node: reply.lacking for node, reply in told.items()}
    sent = _send_frozen(grid, federation, frozen, lacking)
    in_order = sorted(told.values(), key=lambda reply: reply.unit)
    return Discovery(
        setup,
        {node: reply.unit for node, reply in told.items()},
        tuple(reply.state for reply in in_order),
        sent,
    )


def hear_again(
    grid: Grid, federation: FederationSettings, found: Discovery, units: Collection[int]
) -> dict[int, ClusterState | Failure]:
    """What units say now, of those that could not be planned with; who is silent, or tells
    nonsense or another unit's state, is left out."""
    content = records.pack_state_request(found.setup)
    nodes = [node for node, unit in found.units.items() if unit in units]
    messages = [Message(content, node, records.STATE) for node in nodes]
    replies = grid.send_and_receive(messages, timeout=federation.round_timeout_s)
    told = {found.units[reply.metadata.src_node_id]: _told(reply) for reply in replies}
    return {unit: now.state for unit, now in told.items() if now is not None and now.unit == unit}


def _told(reply: Message) -> StateReply | None:
    """None: nothing that could be understood."""
    if reply.has_error():
        return None
    try:
        answer = records.unpack_state(reply.content)
    except WireError:
        return None
    return answer if isinstance(answer, StateReply) else None


def _states(
    grid: Grid, federation: FederationSettings, nodes: Sequence[int], setup: Setup
) -> dict[int, StateReply]:
    content = records.pack_state_request(setup)
    answers = ask(grid, federation, dict.fromkeys(nodes, content), records.STATE)
    return {node: _answer(reply, records.unpack_state) for node, reply in answers.items()}


def _send_frozen(
    grid: Grid,
    federation: FederationSettings,
    frozen: Mapping[str, Tensors],
    lacking: Mapping[int, Sequence[str]],
) -> int:
    """Bytes sent. Raises ``ConfigError`` where a unit cannot keep them."""
    sent = 0
    for part, tensors in frozen.items():  # one at a time, for a model may be as large as a memory
        content = records.pack_groups({part: tensors})
        contents = {node: content for node, parts in lacking.items() if part in parts}
        for reply in ask(grid, federation, contents, records.FROZEN).values():
            _answer(reply, records.unpack_groups)
        sent += len(contents) * records.num_bytes(tensors)
    return sent


def ask(
    grid: Grid, federation: FederationSettings, contents: Mapping[int, RecordDict], kind: str
) -> dict[int, Message]:
    """Every node's reply. Raises ``RoundFailedError`` where one is missing."""
    messages = [Message(content, node, kind) for node, content in contents.items()]
    replies = grid.send_and_receive(messages, timeout=federation.round_timeout_s)
    answers = {reply.metadata.src_node_id: reply for reply in replies}
    if len(answers) < len(contents):
        raise RoundFailedError(
            f"{len(contents) - len(answers)} of {len(contents)} units did not answer {kind} within "
            f"federation.round_timeout_s={federation.round_timeout_s:g}; raise it"
        )
    return answers


def _nodes(grid: Grid, wanted: int) -> list[int]:
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


def _answer(reply: Message, unpack: Callable[[RecordDict], T | Failure]) -> T:
    if reply.has_error():
        raise RoundFailedError(f"a unit cannot tell its state: {one_line(reply.error.reason)}")
    answer = unpack(reply.content)
    if isinstance(answer, Failure):
        raise ConfigError(one_line(answer.message))
    return answer
