"""Replies pulled from a SuperLink and measured before they become messages.

Flower's own grid waits for minutes if a node announces a part and does not send it. It makes any
number of bytes of a few, for an array may name the same piece many times. A malformed part ends the
run, and a reply is believed about its sender. How parts are pulled is Flower's own and no published
interface: this file alone knows of it.
"""

import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from flwr.app import Array, ConfigRecord, Error, Message
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from collapipe.errors import WireError, one_line
from server_app import reply_limit

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

_GRIDS = "flwr.superlink.grid.http_grid"
UNUSABLE = 9
"""Code of the error in place of a reply that cannot be used; none of Flower's."""
_MOST_LATE = 1000  # messages
_AT_ONCE = 2  # parts, as Flower pulls them
_SMALL_BYTES = 2**19  # of all parts that are neither texts nor pieces of arrays
_ITEM, _VALUE, _TEXT = b"\x0a", b"\x0a\x04json\x12", b"*"


@dataclass
class _Coming:
    """A reply of which some parts may still be on their way to the SuperLink."""

    metadata: Metadata
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


@dataclass
class Replies:
    """Those to the questions of one ServerApp."""

    grid: "HttpGrid"
    _coming: dict[str, _Coming] = field(default_factory=dict)
    _late: dict[str, None] = field(default_factory=dict)  # messages without a reply, oldest first

    @classmethod
    def of(cls, grid: Grid) -> Self | None:
        """None for a grid whose replies come from this process."""
        made_of = sys.modules.get(_GRIDS)  # to import it takes seconds
        return cls(grid) if made_of and isinstance(grid, made_of.HttpGrid) else None

    def forget(self, message_ids: Iterable[str]) -> None:
        """Wait no longer for replies to these messages. ``pull`` removes a reply that comes too
        late from the SuperLink, which would keep it until the run's end. It asks for the last
        ``_MOST_LATE`` of such messages, so that the request has a bound."""
        for key in [*self._coming]:
            self._confirm(key)
        self._late |= dict.fromkeys(message_ids)
        for oldest in [*self._late][:-_MOST_LATE]:
            del self._late[oldest]

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages that are whole by now; an error in place of one that cannot
        be used.

        A reply of which some parts are still on their way is not asked for again: the SuperLink
        forgets a message once it has named its reply, and would answer that it is unavailable.
        """
        coming = {each.metadata.reply_to_message_id for each in self._coming.values()}
        asked = {*message_ids} - coming
        wanted = PullAppMessagesRequest(message_ids=[*asked, *self._late])
        found = self.grid._runtime_client.PullMessages(wanted)
        for each, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if each.metadata.reply_to_message_id in asked:
                parts = [*dict.fromkeys(_ids(tree))]
                self._coming[each.metadata.message_id] = _Coming(each.metadata, parts)
            else:  # its parts are not fetched
                self._late.pop(each.metadata.reply_to_message_id, None)
                self._confirm(each.metadata.message_id)
        replies = list[Message]()
        for key, coming in [*self._coming.items()]:
            try:
                if not self._is_whole(coming):
                    continue
                reply = _made(key, coming)
            except WireError as error:
                reason = f"the reply cannot be used: {one_line(error)}"
                reply = make_message(
                    metadata_from_proto(coming.metadata), error=Error(UNUSABLE, reason)
                )
            self._confirm(key)
            replies.append(reply)
        return replies

    def _confirm(self, key: str) -> None:
        """Let the SuperLink forget a reply."""
        self._coming.pop(key, None)
        self.grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=key
            )
        )

    def _is_whole(self, coming: _Coming) -> bool:
        """Fetch what has come since the last look. Raises ``WireError`` for more than the largest
        reply has."""
        if len(coming.missing) > reply_limit.MOST_PARTS:
            raise WireError(f"{len(coming.missing):,} parts, at most {reply_limit.MOST_PARTS:,}")
        most = reply_limit.expected.most_bytes
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while coming.missing:
                some = coming.missing[:_AT_ONCE]
                for key, part in zip(some, pool.map(self._part, some), strict=True):
                    if part:
                        coming.parts[key] = part
                        coming.missing.remove(key)
                        coming.size += len(part)
                if coming.size > most:
                    raise WireError(f"more than {most:,} bytes, as the largest reply has")
                if some == coming.missing[: len(some)]:
                    return False
        return True

    def _part(self, key: str) -> bytes:
        """Empty until it is there."""
        found = self.grid._runtime_client.PullObject(
            PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=key)
        )
        if not found.object_found:
            raise WireError("a part of it is unknown to the SuperLink")
        return bytes(found.object_content) if found.object_available else b""


def _ids(tree: ObjectTree) -> Iterable[str]:
    """Of all parts; a part comes after its children."""
    for child in tree.children:
        yield from _ids(child)
    yield tree.object_id


def _check_parts(parts: dict[str, bytes]) -> None:
    """Raise ``WireError`` if more would be made of the parts than the largest reply has, or much be
    parsed for it."""
    small = made = 0
    for part in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(part)
        if kind == ConfigRecord.__qualname__:
            _check_text(get_object_body(part, ConfigRecord))
        elif kind != ArrayChunk.__qualname__:
            small += len(part)
        if small > _SMALL_BYTES:
            raise WireError(f"more than {_SMALL_BYTES:,} bytes beside texts and arrays")
        if kind == Array.__qualname__:
            pieces = json.loads(get_object_body(part, Array))["arraychunk_ids"]
            made += sum(len(parts[children[piece]]) for piece in pieces)
    if made > reply_limit.expected.most_bytes:
        raise WireError(f"{made:,} bytes of arrays, at most {reply_limit.expected.most_bytes:,}")


def _check_text(body: bytes) -> None:
    """Raise ``WireError`` unless a record has one text or nothing: of many small values much more
    would be made. In protobuf that is an item, its value and the text, each up to the end."""
    at = 0
    for tag in (_ITEM, _VALUE, _TEXT) if body else ():
        if not body.startswith(tag, at):
            raise WireError("a record that has more than one text")
        size, at = _varint(body, at + len(tag))
        if at + size != len(body):
            raise WireError("a record that has more than one text")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number that protobuf wrote at a place, and the place after it."""
    value = 0
    for shift in range(0, 35, 7):
        value |= (body[at] & 127) << shift
        at += 1
        if body[at - 1] < 128:
            return value, at
    raise WireError("a text of more than 32 bits")


def _made(key: str, coming: _Coming) -> Message:
    """The reply of the parts, from who sent it. Raises ``WireError``."""
    try:
        _check_parts(coming.parts)
        made = inflate_object_from_contents(key, coming.parts)
    except WireError:
        raise
    except Exception as error:  # whatever Flower's own code raises for malformed parts
        raise WireError(f"{type(error).__name__}: {one_line(error)}") from error
    if not isinstance(made, Message):
        raise WireError(f"a {type(made).__name__} in place of a message")
    if made.has_error():
        if made.error.code == UNUSABLE:
            raise WireError("an error that units do not send")
        return make_message(metadata_from_proto(coming.metadata), error=made.error)
    return make_message(metadata_from_proto(coming.metadata), content=made.content)
