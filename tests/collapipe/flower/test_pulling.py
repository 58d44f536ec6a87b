"""Replies are pulled in parts, up to a limit of bytes, and attributed to their senders."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_ins_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.superlink.grid.http_grid import HttpGrid

from client_app.app import app
from collapipe.flower import reply_limit
from collapipe.flower.inline_grid import InlineGrid
from collapipe.flower.prompt_grid import Replies, make_prompt
from collapipe.flower.reply_parts import UNUSABLE

MOST = 2**20


class SuperLink:
    """Holds the server's question to each of two nodes and the replies that the nodes push."""

    replies_: Replies

    def __init__(self) -> None:
        InlineGrid(app, 1)  # allows messages to be created
        self.questions = {node: Message(RecordDict(), node, "query.rows") for node in (7, 8)}
        for node, message in self.questions.items():
            message.metadata.__dict__["_message_id"] = f"question to {node}"
        self.replies = list[tuple[Any, ObjectTree]]()
        self.parts, self.confirmed, self.pulled = dict[str, bytes](), list[str](), 0
        self.wanted = list[str]()  # messages whose replies the last pull requested
        self.forgotten = set[str]()  # messages whose replies were listed
        self.answered = set[str]()

    def reply(self, node: int, content: RecordDict | Error) -> Message:
        message = Message(content, reply_to=self.questions[node])
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def push(self, reply: Message, parts: dict[str, bytes] | None = None) -> None:
        """Push a reply as its node does; ``parts`` replace the reply's own parts."""
        proto = message_to_proto(remove_content_from_message(reply))
        if parts is None:
            self.parts |= {k: e.deflate() for k, e in get_all_nested_objects(reply).items()}
            self.replies.append((proto, get_object_tree(reply)))
            return
        self.parts |= parts
        tree = ObjectTree(object_id=[*parts][-1])
        tree.children.extend(ObjectTree(object_id=key) for key in [*parts][:-1])
        proto.metadata.message_id = tree.object_id
        self.replies.append((proto, tree))

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802 - Flower's names
        self.wanted = [*request.message_ids]
        replies, self.replies = self.replies, []
        forgotten = [key for key in self.wanted if key in self.forgotten]
        self.forgotten |= {each.metadata.reply_to_message_id for each, _ in replies}
        for key in forgotten:  # Flower removes a message once its reply was listed
            error = create_message_error_unavailable_ins_message(key, 1)
            replies.append((message_to_proto(error), get_object_tree(error)))
            self.parts |= {k: e.deflate() for k, e in get_all_nested_objects(error).items()}
        protos, trees = ([each[i] for each in replies] for i in (0, 1))
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        part = self.parts.get(request.object_id)
        self.pulled += len(part or b"")
        return PullObjectResponse(
            object_found=part is not None, object_available=bool(part), object_content=part
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def pull(self) -> list[Message]:
        """Pull as the grid does, without requests for replies that were delivered."""
        waited_for = [f"question to {node}" for node in self.questions]
        replies = self.replies_.pull([key for key in waited_for if key not in self.answered])
        self.answered |= {each.metadata.reply_to_message_id for each in replies}
        return replies


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    link = SuperLink()
    run, node = SimpleNamespace(run_id=1), Node(node_id=1)
    grid = SimpleNamespace(_runtime_client=link, run=run, node=node)
    link.replies_ = Replies(cast(HttpGrid, grid))
    monkeypatch.setattr(reply_limit.expected, "most_bytes", MOST)
    return link


def arrays(size: int) -> RecordDict:
    values = np.random.default_rng(0).bytes(size)
    return RecordDict({"x": ArrayRecord({"all": Array("uint8", (size,), "raw", values)})})


def text(json: str) -> RecordDict:
    return RecordDict({"RowsReply": ConfigRecord({"json": json})})


@pytest.mark.parametrize(
    "content", [arrays(MOST // 2), text("[]" * 99), RecordDict({"message": ConfigRecord()})]
)
def test_a_valid_reply_is_delivered(link: SuperLink, content: RecordDict) -> None:
    link.push(reply := link.reply(7, content))
    (received,) = link.pull()
    assert received.content == content and received.metadata.src_node_id == 7
    assert link.confirmed == [reply.object_id] and link.pull() == []
    link.push(link.reply(8, Error(2, "the unit failed")))
    (failed,) = link.pull()
    assert (failed.error.code, failed.error.reason) == (2, "the unit failed")


def test_a_missing_part_does_not_delay_other_replies(link: SuperLink) -> None:
    """Once the part is available, it alone is fetched; earlier parts are not fetched again."""
    late = link.reply(7, arrays(MOST // 2))
    link.push(late)
    missing = link.parts[late.object_id]
    link.parts[late.object_id] = b""
    link.push(link.reply(8, text("{}")))
    assert [each.metadata.src_node_id for each in link.pull()] == [8]
    pulled, link.parts[late.object_id] = link.pulled, missing
    assert [each.metadata.src_node_id for each in link.pull()] == [7]
    assert link.pulled - pulled == len(missing)


def refused(link: SuperLink, words: str) -> None:
    (received,) = link.pull()
    assert received.error.code == UNUSABLE and words in received.error.reason
    assert received.error.reason.count("WireError") == 0  # errors of our own lack their class name
    assert received.metadata.src_node_id == 7 and len(link.confirmed) == 1


def test_pulling_stops_at_the_size_of_the_largest_valid_reply(link: SuperLink) -> None:
    pieces = {get_object_id(piece): piece for piece in (bytes([n]) * 2**19 for n in range(20))}
    link.push(link.reply(7, text("")), pieces)
    refused(link, "more than 1,048,576 bytes")
    assert link.pulled <= MOST + 2 * 2**19


def test_a_reply_with_more_than_10000_parts_is_not_fetched(link: SuperLink) -> None:
    link.push(link.reply(7, text("")), {f"{number:064x}": b"part" for number in range(10_001)})
    refused(link, "10,001 parts")
    assert link.pulled == 0


def part(kind: str, body: bytes, *children: str) -> dict[str, bytes]:
    head = f"{kind} {','.join(children)} {len(body)}".encode()
    made = head + b"\x00" + body
    return {get_object_id(made): made}


def test_a_chunk_that_an_array_lists_1000_times_is_counted_1000_times(link: SuperLink) -> None:
    piece = part("ArrayChunk", b"x" * 2**16)
    (key,) = piece
    body = f'{{"dtype": "uint8", "shape": [9], "stype": "raw", "arraychunk_ids": {[0] * 1000}}}'
    link.push(link.reply(7, text("")), {**piece, **part("Array", body.encode(), key)})
    refused(link, "bytes of arrays")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (part("Array", b"[" * (2**19 + 1)), "besides texts and arrays"),
        (part("RecordDict", b"[" * 99), "JSONDecodeError"),
        (part("ConfigRecord", b"\n\x02\n\x00" * 9), "more than one text"),
        (part("ConfigRecord", ConfigRecord({"json": [1] * 999}).deflate()[20:]), "one text"),
        (part("Nothing", b""), "KeyError"),
        (part("ConfigRecord", b""), "a ConfigRecord in place of a message"),
        ({"ab" * 32: b"no head"}, "Error"),
        ({"ab" * 32: b""}, ""),
    ],
)
def test_invalid_parts_are_not_delivered_as_a_reply(
    link: SuperLink, parts: dict[str, bytes], words: str
) -> None:
    link.push(link.reply(7, text("")), parts)
    if words:
        refused(link, words)
    else:
        assert link.pull() == []


def test_a_reply_is_attributed_to_the_node_that_pushed_it(link: SuperLink) -> None:
    """The SuperLink records which node pushed a reply; the reply's parts can name any node."""
    mine, others = link.reply(7, text("mine")), link.reply(8, text("theirs"))
    proto = message_to_proto(remove_content_from_message(mine))
    proto.metadata.message_id = others.object_id
    link.parts |= {k: e.deflate() for k, e in get_all_nested_objects(others).items()}
    link.replies.append((proto, get_object_tree(others)))
    (received,) = link.pull()
    assert received.metadata.src_node_id == 7
    assert received.metadata.reply_to_message_id == "question to 7"


def test_a_reply_to_an_unknown_message_is_ignored(link: SuperLink) -> None:
    stray = link.reply(7, text(""))
    proto = message_to_proto(remove_content_from_message(stray))
    proto.metadata.reply_to_message_id = "another"
    link.replies.append((proto, get_object_tree(stray)))
    assert link.pull() == []


def test_a_late_reply_is_removed_without_being_fetched(link: SuperLink) -> None:
    """The next pull, for the reply to another question, removes the late reply."""
    late, question = link.reply(7, arrays(MOST // 2)), "question to 7"
    link.replies_.forget([question])
    assert link.replies_.pull(["question to 8"]) == []
    assert {*link.wanted} == {question, "question to 8"}
    link.push(late)
    link.push(link.reply(8, text("{}")))
    assert [each.metadata.src_node_id for each in link.replies_.pull(["question to 8"])] == [8]
    assert late.object_id in link.confirmed
    assert link.pulled < MOST // 2
    assert link.replies_.pull(["another"]) == [] and link.wanted == ["another"]


def test_only_the_last_1000_late_replies_are_looked_for(link: SuperLink) -> None:
    for number in range(30):
        link.replies_.forget([f"{number}/{unit}" for unit in range(100)])
    link.replies_.pull(["now"])
    assert [link.wanted[at] for at in (0, 1, -1)] == ["now", "20/0", "29/99"]
    assert len(link.wanted) == 1 + 1000


def test_flowers_grid_has_the_attributes_that_our_pull_uses() -> None:
    grid = HttpGrid(insecure=True, token="any")
    make_prompt(grid)
    assert {*vars(grid)} >= {"_run", "node", "send_and_receive"}
    assert isinstance(type(grid).__dict__["_runtime_client"], property)
