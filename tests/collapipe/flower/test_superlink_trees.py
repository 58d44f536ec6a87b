"""No node can change the parts of another node's message."""

from typing import cast

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.object_store import (
    NoObjectInStoreError,
    ObjectStoreFactory,
    object_store_factory,
)
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from collapipe.flower import superlink

RUN = 7


def key(number: int) -> str:
    return f"{number:064x}"


def tree(number: int, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=key(number), children=children)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> InMemoryObjectStore:
    """The object store of our SuperLink."""
    monkeypatch.setattr(superlink, "end_with_parent", lambda parent, within_s: None)
    monkeypatch.setattr(superlink, "_start_own_superexec", lambda: None)
    monkeypatch.setattr(superlink, "flower_superlink", lambda: None)
    monkeypatch.setattr(superlink.sys, "argv", ["superlink", "1"])
    monkeypatch.setattr(superlink.uvicorn, "run", None)
    monkeypatch.setattr(object_store_factory, "InMemoryObjectStore", InMemoryObjectStore)
    superlink.run(lambda app: app)
    return cast(InMemoryObjectStore, ObjectStoreFactory().store())


def test_a_node_cannot_add_parts_to_another_nodes_message(store: InMemoryObjectStore) -> None:
    """An empty record is a part of many messages; its hash is known before they are sent."""
    store.preregister(RUN, tree(5, tree(3), tree(3, tree(1, tree(2)))))
    store.preregister(RUN, honest := tree(9, tree(1)))
    assert store.get_object_tree(key(9)) == honest


def test_a_node_cannot_remove_parts_from_another_nodes_message(store: InMemoryObjectStore) -> None:
    """The liar announces a common part without its child, and lets the child be deleted later."""
    store.preregister(RUN, tree(5, tree(3)))
    store.preregister(RUN, tree(6, tree(1)))
    store.preregister(RUN, honest := tree(9, tree(3, tree(1))))
    store.delete(key(6))
    store.delete(key(1))
    assert store.get_object_tree(key(9)) == honest and key(1) in store
    store.delete(key(9))
    store.delete(key(5))
    assert len(store) == 0


def test_messages_that_list_each_others_parts_do_not_expand(store: InMemoryObjectStore) -> None:
    """Otherwise 90 parts (12 kB) could expand to 2**90, and 2,000 messages to as many levels."""
    doubled = tree(90)
    for number in reversed(range(1, 90)):
        doubled = tree(number, doubled, tree(number + 1))
    store.preregister(RUN, doubled)
    for number in range(1000, 3000):
        store.preregister(RUN, last := tree(number, tree(number - 1), tree(number - 2)))
    assert store.get_object_tree(key(1)) == doubled
    assert store.get_object_tree(key(2999)) == last


def test_a_message_with_itself_as_a_part_is_deleted_with_its_parts(
    store: InMemoryObjectStore,
) -> None:
    store.preregister(RUN, tree(4, tree(3, tree(4)), tree(2)))
    store.delete(key(4))
    assert len(store) == 0
    with pytest.raises(NoObjectInStoreError):
        store.get_object_tree(key(4))


def test_the_server_can_parse_the_deepest_tree_that_a_node_can_send() -> None:
    """One unreadable tree would hide all replies of a pull."""
    deepest = tree(0)
    while True:
        try:
            PushMessagesRequest.FromString(
                PushMessagesRequest(message_object_trees=[tree(1, deepest)]).SerializeToString()
            )
        except Exception:
            break
        deepest = tree(1, deepest)
    pulled = PullAppMessagesResponse(message_object_trees=[deepest]).SerializeToString()
    assert PullAppMessagesResponse.FromString(pulled).message_object_trees[0] == deepest
