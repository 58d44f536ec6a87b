"""Build a reply from its parts, and refuse parts that would expand to more than any reply."""

import json

from flwr.app import Array, ConfigRecord, Message
from flwr.app.message import make_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import Metadata
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from collapipe.errors import WireError, one_line
from collapipe.flower import reply_limit

UNUSABLE = 9
"""Error code that replaces an unusable reply; Flower does not use this code."""
_SMALL_BYTES = 2**19  # total limit of parts that are neither texts nor pieces of arrays
_ITEM, _VALUE, _TEXT = b"\x0a", b"\x0a\x04json\x12", b"*"


def inflate(key: str, parts: dict[str, bytes], metadata: Metadata) -> Message:
    """Build the reply ``key`` from its parts, with the sender in the SuperLink's ``metadata``.

    Raises ``WireError`` if it is malformed or too large.
    """
    try:
        _check_parts(parts)
        made = inflate_object_from_contents(key, parts)
    except WireError:
        raise
    except Exception as error:  # Flower's code raises many types for malformed parts
        raise WireError(f"{type(error).__name__}: {one_line(error)}") from error
    if not isinstance(made, Message):
        raise WireError(f"a {type(made).__name__} in place of a message")
    if made.has_error():
        if made.error.code == UNUSABLE:
            raise WireError("an error that units do not send")
        return make_message(metadata_from_proto(metadata), error=made.error)
    return make_message(metadata_from_proto(metadata), content=made.content)


def _check_parts(parts: dict[str, bytes]) -> None:
    """Raise ``WireError`` if the parts would expand to more than the largest expected reply, or if
    too many bytes would be parsed."""
    small = made = 0
    for part in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(part)
        if kind == ConfigRecord.__qualname__:
            _check_text(get_object_body(part, ConfigRecord))
        elif kind != ArrayChunk.__qualname__:
            small += len(part)
        if small > _SMALL_BYTES:
            raise WireError(f"more than {_SMALL_BYTES:,} bytes besides texts and arrays")
        if kind == Array.__qualname__:
            pieces = json.loads(get_object_body(part, Array))["arraychunk_ids"]
            made += sum(len(parts[children[piece]]) for piece in pieces)
    if made > reply_limit.expected.most_bytes:
        raise WireError(f"{made:,} bytes of arrays, at most {reply_limit.expected.most_bytes:,}")


def _check_text(body: bytes) -> None:
    """Raise ``WireError`` unless a record is empty or has one text; many small values would expand
    to much more memory. In protobuf the text ends its value and item, which end the record."""
    at = 0
    for tag in (_ITEM, _VALUE, _TEXT) if body else ():
        if not body.startswith(tag, at):
            raise WireError("a record that has more than one text")
        size, at = _varint(body, at + len(tag))
        if at + size != len(body):
            raise WireError("a record that has more than one text")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Decode a protobuf varint at an offset. Returns the number and the offset after it."""
    value = 0
    for shift in range(0, 35, 7):
        value |= (body[at] & 127) << shift
        at += 1
        if body[at - 1] < 128:
            return value, at
    raise WireError("a text of more than 32 bits")
