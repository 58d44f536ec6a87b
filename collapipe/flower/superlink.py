"""``python -m collapipe.flower.superlink PARENT OPTIONS…`` runs Flower's SuperLink.

It takes the options of ``flower-superlink``, and ends with the process PARENT. ``run`` adds a guard
in front of a SuperLink that other machines reach.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import uvicorn
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, object_store_factory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from collapipe.process.children import end_with_parent

Guard = Callable[[ASGIApp], ASGIApp]
# After the parent has ended: open requests would delay the end, and a server that was restarted
# meanwhile would start runs for both.
_END_S = 3.0
_SUPEREXEC = "collapipe.flower.superexec"
_HEAD_S = 60.0  # time from a connection, or a request's first bytes, to the end of its head


def run(guard: Guard | None = None) -> None:
    """Run a SuperLink until it receives a signal or its parent process ends.

    A ``guard`` gets Flower's application, and returns the one that answers requests. With a guard,
    the SuperLink also listens on IPv6, and no node can change the parts of another's messages.
    """
    end_with_parent(int(sys.argv.pop(1)), within_s=_END_S)
    _start_own_superexec()
    if guard is not None:
        uvicorn.run = partial(_run_guarded, uvicorn.run, guard)
        setattr(object_store_factory, InMemoryObjectStore.__name__, _OwnTrees)
    flower_superlink()


def _all_addresses() -> dict[str, str]:
    """Return uvicorn's option to listen on IPv4 and IPv6, if this machine has IPv6."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        return {}
    return {"host": ""}


class _PromptHead(H11Protocol):
    """Closes a connection whose next request has no complete head after ``_HEAD_S``. Uvicorn waits
    for it without a limit, so unknown callers could exhaust the process's open files."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._expect_head()
        super().data_received(data)

    def _expect_head(self) -> None:
        self.loop.call_later(_HEAD_S, self._close_without_head, self.cycle)

    def _close_without_head(self, last: object) -> None:
        if self.cycle is last:  # no request has begun since
            self.transport.close()


def _run_guarded(run: Callable[..., None], guard: Guard, app: ASGIApp, **options: Any) -> None:
    # Headers of proxies are ignored, because any caller could forge them. h11 limits the length of
    # a request's head; uvicorn's other parser does not.
    own = {"proxy_headers": False, "access_log": False, "http": _PromptHead, "ws": "none"}
    run(guard(app), **{**options, **own, **_all_addresses()})


class _OwnTrees(InMemoryObjectStore):
    """Keeps the tree of each message's parts as its sender announced it.

    Flower keeps a part's children from the first message that names the part. A node could thus add
    or remove parts of other nodes' messages, or expand a few kilobytes to 2**99 parts. Here only
    the message itself has children: all its other parts.
    """

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        root = object_tree.object_id
        parts = {each.object_id: None for each in iterate_object_tree(object_tree)}
        del parts[root]
        flat = ObjectTree(object_id=root, children=[ObjectTree(object_id=each) for each in parts])
        with self.lock_store:
            missing = super().preregister(run_id, flat)
            self.store[root].tree = object_tree  # type: ignore[attr-defined]
        return missing

    def get_object_tree(self, object_id: str) -> ObjectTree:
        tree: ObjectTree | None = getattr(self.store.get(object_id), "tree", None)
        if tree is None:
            raise NoObjectInStoreError(f"Object {object_id} is not a message.")
        return tree


def _start_own_superexec() -> None:
    """Replace the command by which Flower's SuperLink starts a SuperExec."""
    flower = import_module(flower_superlink.__module__)  # whose package has a function of its name
    command_of = flower._get_superexec_command

    def command(**options: Any) -> list[str]:
        return [sys.executable, "-P", "-m", _SUPEREXEC, *command_of(**options)[1:]]

    setattr(flower, command_of.__name__, command)


if __name__ == "__main__":
    run()
