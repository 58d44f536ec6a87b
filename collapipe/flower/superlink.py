"""``python -m collapipe.flower.superlink PARENT OPTIONS…`` runs Flower's SuperLink.

It takes the options of ``flower-superlink``, and ends with the process PARENT. ``run`` adds a guard
in front of a SuperLink that other machines reach.
"""

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import uvicorn
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from collapipe.flower.reply_limit import MOST_PARTS
from collapipe.process.children import end_with_parent

Guard = Callable[[ASGIApp], ASGIApp]
# After the parent has ended: open requests would delay the end, and a server that was restarted
# meanwhile would start runs for both.
_END_S = 3.0
_SUPEREXEC = "collapipe.flower.superexec"
_MOST_LEVELS = 16  # levels in the tree of a message's parts; Flower's messages have 5
_HEAD_S = 60.0  # time from a connection, or a request's first bytes, to the end of its head


def run(guard: Guard | None = None) -> None:
    """Run a SuperLink until it receives a signal or its parent process ends.

    A ``guard`` gets Flower's application, and returns the one that answers requests. With a guard,
    the SuperLink also listens on IPv6, and limits trees of messages' parts.
    """
    end_with_parent(int(sys.argv.pop(1)), within_s=_END_S)
    _start_own_superexec()
    if guard is not None:
        uvicorn.run = partial(_run_guarded, uvicorn.run, guard)
        trees = _bounded(InMemoryObjectStore.get_object_tree)
        InMemoryObjectStore.get_object_tree = trees  # type: ignore[method-assign, assignment]
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


class _Walk(threading.local):
    """The numbers of nodes and levels that a thread has visited in a tree of parts."""

    nodes = levels = 0


_walk = _Walk()


def _bounded(
    get_object_tree: Callable[[InMemoryObjectStore, str], ObjectTree],
) -> Callable[[InMemoryObjectStore, str], ObjectTree]:
    """Limit Flower's ``get_object_tree`` to ``MOST_PARTS`` nodes and ``_MOST_LEVELS`` levels.
    A larger tree raises ``NoObjectInStoreError``, and Flower drops the message.

    Flower keeps a part's children from the first message that names the part, and
    repeats them for every other part that names it. A few kilobytes can thus expand to 2**99 nodes,
    or to more levels than the receiver can parse.
    """

    def bounded(store: InMemoryObjectStore, object_id: str) -> ObjectTree:
        _walk.nodes = _walk.nodes + 1 if _walk.levels else 1
        if _walk.nodes > MOST_PARTS or _walk.levels >= _MOST_LEVELS:
            raise NoObjectInStoreError(
                f"Object {object_id}: its message has more than {MOST_PARTS:,} parts "
                f"or {_MOST_LEVELS} levels of parts."
            )
        _walk.levels += 1
        try:
            return get_object_tree(store, object_id)  # calls ``bounded`` again for each child
        finally:
            _walk.levels -= 1

    return bounded


def _start_own_superexec() -> None:
    """Replace the command by which Flower's SuperLink starts a SuperExec."""
    flower = import_module(flower_superlink.__module__)  # whose package has a function of its name
    command_of = flower._get_superexec_command

    def command(**options: Any) -> list[str]:
        return [sys.executable, "-P", "-m", _SUPEREXEC, *command_of(**options)[1:]]

    setattr(flower, command_of.__name__, command)


if __name__ == "__main__":
    run()
