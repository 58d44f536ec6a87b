"""The tree that lists a message's parts has a limited size."""

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from collapipe.flower import superlink


def key(number: int) -> str:
    return f"{number:064x}"


def tree(number: int, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=key(number), children=children)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> InMemoryObjectStore:
    """The object store as our SuperLink patches it."""
    monkeypatch.setattr(superlink, "end_with_parent", lambda parent, within_s: None)
    monkeypatch.setattr(superlink, "_start_own_superexec", lambda: None)
    monkeypatch.setattr(superlink, "flower_superlink", lambda: None)
    monkeypatch.setattr(superlink.sys, "argv", ["superlink", "1"])
    monkeypatch.setattr(superlink.uvicorn, "run", None)
    get_object_tree = InMemoryObjectStore.get_object_tree
    monkeypatch.setattr(InMemoryObjectStore, "get_object_tree", get_object_tree)
    superlink.run(lambda app: app)
    return InMemoryObjectStore()


@pytest.mark.parametrize("levels", [15, 90])
def test_a_tree_that_lists_a_part_twice_at_each_level_is_refused(
    levels: int, store: InMemoryObjectStore
) -> None:
    """Without a limit, 15 levels (2 kB) expand to 32,767 nodes and 90 levels to 2**90 nodes."""
    doubled = tree(levels)
    for number in reversed(range(1, levels)):
        doubled = tree(number, doubled, tree(number + 1))
    store.preregister(1, doubled)
    with pytest.raises(NoObjectInStoreError):
        store.get_object_tree(key(1))
    store.preregister(1, honest := tree(199, tree(198, tree(197)), tree(196)))
    assert store.get_object_tree(key(199)) == honest


def test_a_tree_with_too_many_levels_is_refused(store: InMemoryObjectStore) -> None:
    """Messages can list each other's parts: 2,000 levels would raise ``RecursionError``."""
    for number in range(2000):
        store.preregister(1, tree(number, *[tree(number - 1)] * (number > 0)))
    with pytest.raises(NoObjectInStoreError):
        store.get_object_tree(key(1999))
    assert store.get_object_tree(key(4)).children[0].object_id == key(3)


def test_a_message_with_more_than_10000_parts_is_refused(store: InMemoryObjectStore) -> None:
    for parts in (9_999, 10_000):
        store.preregister(1, tree(2**20 + parts, *map(tree, range(parts))))
    assert len(store.get_object_tree(key(2**20 + 9_999)).children) == 9_999
    with pytest.raises(NoObjectInStoreError):
        store.get_object_tree(key(2**20 + 10_000))
