"""Make Flower's grids notice replies soon, and check replies before they become messages.

Flower's own grid has weaknesses that a node could use. It waits for minutes if a node announces a
part and does not send it. A few bytes can expand to any size, because an array may name the same
piece many times. A malformed part ends the run. The sender is taken from the reply itself.
"""

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    PullObjectRequest,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from collapipe.errors import WireError, one_line
from collapipe.flower import reply_limit
from collapipe.flower.reply_parts import UNUSABLE, inflate

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

_GRIDS = "flwr.superlink.grid.http_grid"
_MOST_LATE = 1000  # messages
_NODE_UNAVAILABLE = 5  # Flower's code
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 3.0
_SHARE = 0.05  # a polling pause is at most this share of the time waited so far
_AT_ONCE = 2  # parts that are pulled at the same time, as in Flower


def make_prompt(grid: Grid) -> Grid:
    """Make ``grid`` detect a reply within 5 % of the time waited, and attribute it to its node.

    Flower's grids poll every 0.1 s (simulated) or 3 s (deployed), even in a short round. If a node
    has left or cannot be reached, Flower sends an error in its own name, or nothing.
    """
    puller = Replies.of(grid)
    pull = grid.pull_messages if puller is None else puller.pull

    def send_and_receive(
        messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        questions, replies = list(messages), list[Message]()
        ids: list[str | None] = [*grid.push_messages(questions)] or [None] * len(questions)
        waiting = {key: each for key, each in zip(ids, questions, strict=True) if key is not None}
        error = Error(_NODE_UNAVAILABLE, "Flower could not send the message to the node")
        replies += [
            Message(error, reply_to=each)
            for key, each in zip(ids, questions, strict=True)
            if key is None
        ]
        began = time.monotonic()
        while True:
            waited_s = time.monotonic() - began
            last = timeout is not None and waited_s >= timeout
            for reply in pull(list(waiting)) if waiting else ():
                request = waiting.pop(reply.metadata.reply_to_message_id, None)
                if request is None:
                    continue  # a reply to an earlier question
                failed = reply.has_error()
                replies.append(Message(reply.error, reply_to=request) if failed else reply)
            if not waiting or last:
                if puller is not None:
                    puller.forget(waiting)
                return replies
            waited_s = time.monotonic() - began
            pause_s = min(max(_FIRST_PAUSE_S, _SHARE * waited_s), _LAST_PAUSE_S)
            time.sleep(pause_s if timeout is None else min(pause_s, max(timeout - waited_s, 0.0)))

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid


@dataclass
class _PartialReply:
    """A reply whose parts may not all have reached the SuperLink yet."""

    metadata: Metadata
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


@dataclass
class Replies:
    """Pulls the replies to the questions of one ServerApp."""

    grid: "HttpGrid"
    _partial: dict[str, _PartialReply] = field(default_factory=dict)
    _late: dict[str, None] = field(default_factory=dict)  # messages without a reply, oldest first

    @classmethod
    def of(cls, grid: Grid) -> Self | None:
        """Return None for a grid whose replies come from this process."""
        made_of = sys.modules.get(_GRIDS)  # importing it would take seconds
        return cls(grid) if made_of and isinstance(grid, made_of.HttpGrid) else None

    def forget(self, message_ids: Iterable[str]) -> None:
        """Stop waiting for replies to these messages.

        The SuperLink would keep late replies until the run's end, so ``pull`` removes them. It asks
        for the last ``_MOST_LATE`` such messages, so that its request has a bounded size.
        """
        for key in [*self._partial]:
            self._confirm(key)
        self._late |= dict.fromkeys(message_ids)
        for oldest in [*self._late][:-_MOST_LATE]:
            del self._late[oldest]

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the complete replies to these messages. An error message replaces an unusable
        reply.

        A reply of which some parts have not arrived is not requested again: the SuperLink deletes
        a message when it announces the reply, and would report the message as unavailable.
        """
        arriving = {each.metadata.reply_to_message_id for each in self._partial.values()}
        requested = {*message_ids} - arriving
        wanted = PullAppMessagesRequest(message_ids=[*requested, *self._late])
        found = self.grid._runtime_client.PullMessages(wanted)
        for each, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if each.metadata.reply_to_message_id in requested:
                parts = [*dict.fromkeys(part.object_id for part in iterate_object_tree(tree))]
                self._partial[each.metadata.message_id] = _PartialReply(each.metadata, parts)
            else:  # its parts are not fetched
                self._late.pop(each.metadata.reply_to_message_id, None)
                self._confirm(each.metadata.message_id)
        replies = list[Message]()
        for key, partial in [*self._partial.items()]:
            try:
                if not self._is_whole(partial):
                    continue
                reply = inflate(key, partial.parts, partial.metadata)
            except WireError as error:
                reason = f"the reply cannot be used: {one_line(error)}"
                reply = make_message(
                    metadata_from_proto(partial.metadata), error=Error(UNUSABLE, reason)
                )
            self._confirm(key)
            replies.append(reply)
        return replies

    def _confirm(self, key: str) -> None:
        """Let the SuperLink delete a reply."""
        self._partial.pop(key, None)
        self.grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=key
            )
        )

    def _is_whole(self, partial: _PartialReply) -> bool:
        """Fetch the parts that have arrived; return whether the reply is complete. Raises
        ``WireError`` if it is larger than the largest expected reply."""
        if len(partial.missing) > reply_limit.MOST_PARTS:
            raise WireError(f"{len(partial.missing):,} parts, at most {reply_limit.MOST_PARTS:,}")
        most = reply_limit.expected.most_bytes
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while partial.missing:
                some = partial.missing[:_AT_ONCE]
                for key, part in zip(some, pool.map(self._part, some), strict=True):
                    if part:
                        partial.parts[key] = part
                        partial.missing.remove(key)
                        partial.size += len(part)
                if partial.size > most:
                    raise WireError(f"more than {most:,} bytes, the size of the largest reply")
                if some == partial.missing[: len(some)]:
                    return False
        return True

    def _part(self, key: str) -> bytes:
        """Return a part's bytes; empty until it has arrived. Raises ``WireError`` if the SuperLink
        does not know the part."""
        found = self.grid._runtime_client.PullObject(
            PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=key)
        )
        if not found.object_found:
            raise WireError("the SuperLink does not know a part of it")
        return bytes(found.object_content) if found.object_available else b""
