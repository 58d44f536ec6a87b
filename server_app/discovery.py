"""Which nodes there are, and what their clusters are like."""

import time

from flwr.app import Message
from flwr.serverapp import Grid

from collapipe import wire
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.messages import Failure
from collapipe.settings import FederationSettings
from collapipe.state import ClusterState

_WAIT_S = 30.0  # for simulated or deployed nodes to connect
_POLL_S = 0.5


def discover(grid: Grid, federation: FederationSettings, tokenizer: str) -> dict[int, ClusterState]:
    """State of each node's cluster, after giving it the tokeniser.

    Raises
    ------
    ConfigError
        Where the number of nodes is not ``federation.num_units``, or a unit's data cannot be used.
    RoundFailedError
        Where a unit cannot tell its state.
    """
    nodes = _nodes(grid, federation.num_units)
    content = wire.pack_state_request(tokenizer)
    messages = [Message(content, node, wire.STATE) for node in nodes]
    replies = grid.send_and_receive(messages, timeout=federation.round_timeout_s)
    states = {reply.metadata.src_node_id: _state(reply) for reply in replies}
    if len(states) < len(nodes):
        raise RoundFailedError(
            f"{len(nodes) - len(states)} of {len(nodes)} units did not tell their state within "
            f"federation.round_timeout_s={federation.round_timeout_s:g}; raise it"
        )
    units = sorted(state.unit for state in states.values())
    if units != list(range(federation.num_units)):
        raise RoundFailedError(
            f"units {units} told their state, expected 0 … {federation.num_units - 1}; "
            "each node needs a partition-id of its own"
        )
    return states


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


def _state(reply: Message) -> ClusterState:
    if reply.has_error():
        raise RoundFailedError(f"a unit cannot tell its state: {reply.error.reason}")
    answer = wire.unpack_state(reply.content)
    if isinstance(answer, Failure):
        raise ConfigError(answer.message)
    return answer
