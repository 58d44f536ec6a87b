"""Flower's SuperLink, of which other machines reach no more than nodes need.

A SuperLink has one port for nodes, for who submits runs and for its own apps, and asks only nodes
who they are: whoever reaches it could submit a run, which is code. Here a request from another
machine gets no further than the nodes' part, and there only with the signature of a unit that was
admitted: Flower reads a whole request before it asks who sent it. Who submits does so on this
machine, or comes through a tunnel of ssh. ``python -m server_app.superlink PARENT OPTIONS…`` takes
the options of ``flower-superlink`` and ends with the process PARENT.
"""

import asyncio
import ipaddress
import json
import logging
import re
import socket
import sys
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import flwr
import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import control_pb2
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.cli.flower_superlink import flower_superlink
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage
from uvicorn.protocols.http.h11_impl import H11Protocol

import collapipe
from collapipe.credentials.keys import UNREADABLE, fingerprint
from collapipe.deployment.run_archive import pack
from collapipe.deployment.server_folder import (
    ADMITTED,
    CONTROL,
    NODES,
    RUNS,
    ServerFolder,
    own_folder,
)
from collapipe.errors import ConfigError, one_line
from collapipe.processes import end_with_parent
from server_app.refusals import Refusals
from server_app.reply_limit import MOST_PARTS

_log = logging.getLogger(__name__)
_FLEET = "/v1/fleet/"
_METRICS = "/metrics"
_NUMBER, _MARK = re.compile(r"[0-9]{1,20}"), re.compile(r"\.[0-9a-f]{32}")
_PUSHES = "/v1/fleet/push-messages", "/v1/fleet/push-object"  # a reply, and its parts
_MOST_BYTES = 80 * 2**20  # of a part of a reply: words of rows are one part, arrays many of 5 MiB
_SMALL_BYTES = 2**20  # of another request, and of replies while no run has asked anything
_HEAD_BYTES = 2**20  # of a part, up to its first zero: Flower splits it into up to 27 times that
_MOST_LEVELS = 16  # of the tree of a message's parts; Flower's own have 5
_HEAD_S = 60.0  # from a connection to the end of its first request's head
_SHARE = 2  # times the largest reply: what a node may send of it, for a broken push is repeated


class NodesAlone:
    """Passes on to ``app`` what comes from this machine, and what admitted units ask.

    Tells who knows the fingerprint of a unit's key whether the unit is among the nodes that
    ``folder`` has, and which versions are here. For each question a node can send at most
    ``_SMALL_BYTES`` and ``_SHARE`` times the largest reply to any question of the run so far, and
    nothing but replies of its own. On this machine the guard hands out the metrics of the last
    round, and folders of runs: who may submit runs could read them anyhow. The log says once of
    each stranger that it was refused.
    """

    def __init__(self, app: ASGIApp, folder: ServerFolder) -> None:
        self._app, self._folder, self._refusals = app, folder, Refusals(_log)
        self._questions: object = None  # that were the last when bytes were counted
        self._sent = Counter[str]()  # bytes of replies to these, by the senders' keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        answer: ASGIApp = self._app
        if scope["type"] == "http" and path.startswith(ADMITTED):
            answer = JSONResponse(self._told(scope, path.removeprefix(ADMITTED)))
        elif scope["type"] == "http" and path.startswith(_FLEET):
            answer = self._refusal(scope, Headers(scope=scope)) or self._app
        elif scope["type"] != "lifespan" and not _is_own(scope):
            self._refusals.note(_host(scope), "it asks for more than units need")
            answer = PlainTextResponse("only on the SuperLink's own machine", 403)
        elif path == _METRICS:
            metrics = self._folder.metrics
            answer = PlainTextResponse(metrics.read_text() if metrics.exists() else "")
        elif path.startswith(CONTROL):
            request = Request(scope, receive)
            answer = await self._control(path.removeprefix(CONTROL), await request.body())
        elif path.startswith(RUNS):
            mark = scope["query_string"].decode("ascii", "replace")
            answer = _run(self._folder, path.removeprefix(RUNS), mark)
        await answer(scope, receive, send)

    async def _control(self, method: str, question: bytes) -> Response:
        """Flower's own answer to ``question``, which is JSON of the fields of a request to this
        ``method`` of its Control API, such as ``list-nodes``: commands on this machine ask without
        Flower's libraries, whose import takes seconds."""
        kind = "".join(word.capitalize() for word in method.split("-"))
        try:
            request = json_format.Parse(question, getattr(control_pb2, f"{kind}Request")())
        except (AttributeError, json_format.ParseError) as error:
            return PlainTextResponse(one_line(error), 400)
        head = dict.fromkeys(("content-type", "accept"), PROTOBUF_MEDIA_TYPE)
        flower = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=flower, base_url="http://127.0.0.1") as client:
            content = request.SerializeToString()
            answer = await client.post(f"/v1/control/{method}", content=content, headers=head)
        if answer.is_error:
            return PlainTextResponse(one_line(answer.text), answer.status_code)
        told = getattr(control_pb2, f"{kind}Response").FromString(answer.content)
        return JSONResponse(json_format.MessageToDict(told, preserving_proto_field_name=True))

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """Before anything is read of a request but its head."""
        known = self._known()
        if known is None:  # which nodes take for a reason to try again
            return PlainTextResponse("units are being admitted", 503)
        key = _shown(headers)
        if key is None or fingerprint(key) not in known or not _has_signed(key, headers):
            shown = "no key of a unit" if key is None else _named(key)
            self._refusals.note(_host(scope), f"{shown}, which is not admitted or signed nothing")
            return PlainTextResponse("not an admitted unit", 401)
        length, path = headers.get("Content-Length", ""), scope["path"]
        most = _MOST_BYTES if path == _PUSHES[1] else _SMALL_BYTES
        if not length.isdecimal() or int(length) > most:
            return PlainTextResponse(f"more than {most} bytes, or nobody says how many", 413)
        if path in _PUSHES and not self._has_room(fingerprint(key), int(length)):
            self._refusals.note(_host(scope), f"{_named(key)} sends more than any reply has")
            return PlainTextResponse("more than any reply of the runs has", 413)
        if path == _PUSHES[0]:
            node = str(known[fingerprint(key)])
            return _Checked(self._app, partial(_are_own_replies, node), "not a reply of its own")
        if path == _PUSHES[1]:
            refusal = f"the head of the part has no end in {_HEAD_BYTES} bytes"
            return _Checked(self._app, _has_short_head, refusal)
        return None

    def _has_room(self, key: str, size: int) -> bool:
        """Count the bytes that a node has sent since the last question of any run; whether they are
        no more than the replies can have, as the ServerApps of the runs have noted."""
        expected = self._folder.expected_replies()
        if self._questions != expected:
            self._questions, self._sent = expected, Counter()
        most = _SMALL_BYTES + _SHARE * sum(most_bytes for _, most_bytes in expected.values())
        self._sent[key] += size
        return self._sent[key] <= most

    def _known(self) -> dict[str, object] | None:
        """Admitted units by the fingerprints of their keys; None while the server starts."""
        nodes = self._folder.flower_home / NODES
        return dict(json.loads(nodes.read_text())) if nodes.exists() else None

    def _told(self, scope: Scope, key: str) -> dict[str, object]:
        """``admitted`` is None while the server starts."""
        versions = {"collapipe": collapipe.__version__, "flwr": flwr.__version__}
        known = self._known()
        if known is not None and key not in known:
            self._refusals.note(_host(scope), f"key {key} is not admitted")
        return {**versions, "admitted": None if known is None else key in known}


@dataclass(frozen=True, slots=True)
class _Checked:
    """Passes on to ``app`` a request if its body passes ``check``; answers ``refusal`` if not."""

    app: ASGIApp
    check: Callable[[bytes], bool]
    refusal: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        if not self.check(body):
            answer = PlainTextResponse(self.refusal, 403)
            return await answer(scope, receive, send)
        read = False

        async def again() -> ASGIMessage:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, again, send)


def _are_own_replies(node: str, body: bytes) -> bool:
    """Flower checks which node sends a request, but not whose messages are in it: a node could send
    other nodes the server's questions, or replies in their names."""
    try:
        messages = PushMessagesRequest.FromString(body).messages_list
    except DecodeError:
        return False
    found = [each.metadata for each in messages]
    return all(str(each.src_node_id) == node and each.reply_to_message_id for each in found)


def _has_short_head(body: bytes) -> bool:
    """A head lists the parts below a part; 2**20 bytes list more than a reply may have."""
    try:
        part = PushObjectRequest.FromString(body).object_content
    except DecodeError:
        return False
    return bool(part.find(b"\0", 0, _HEAD_BYTES) >= 0)


def _named(key: EllipticCurvePublicKey) -> str:
    """A key in the log."""
    return f"key {fingerprint(key)}"


def _run(folder: ServerFolder, number: str, mark: str) -> Response:
    """The run's folder as an archive; nothing where who asks has put the ``mark`` there, and so has
    the folder."""
    run_dir = folder.run_dir(number) if _NUMBER.fullmatch(number) else None
    if run_dir is None or not run_dir.is_dir():
        return PlainTextResponse("the server knows no folder of this run", 404)
    if _MARK.fullmatch(mark) and (run_dir / mark).exists():
        return Response(status_code=204)
    try:
        return StreamingResponse(pack(run_dir), media_type="application/x-tar")
    except ConfigError as error:
        return PlainTextResponse(str(error), 409)


def _shown(headers: Headers) -> EllipticCurvePublicKey | None:
    """The key that a request shows, which need not be its sender's."""
    try:
        key = load_pem_public_key(b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER]))
    except (KeyError, *UNREADABLE):
        return None
    return key if isinstance(key, EllipticCurvePublicKey) else None


def _has_signed(key: EllipticCurvePublicKey, headers: Headers) -> bool:
    """Whether the key signed the request's time; Flower compares that time."""
    try:
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER])
        key.verify(signature, headers[TIMESTAMP_HEADER].encode(), ECDSA(SHA256()))
    except (KeyError, *UNREADABLE):
        return False
    return True


def _host(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _is_own(scope: Scope) -> bool:
    host = _host(scope)
    return bool(host) and ipaddress.ip_address(host).is_loopback


def _all_addresses() -> dict[str, str]:
    """Where uvicorn listens besides 0.0.0.0: where this machine has IPv6, an empty host is both."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        return {}
    return {"host": ""}


class _PromptHead(H11Protocol):
    """Closes a connection without the head of a request: uvicorn waits for the first without end,
    and so strangers could use up the process's files."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_HEAD_S, self._close_without_head)

    def _close_without_head(self) -> None:
        if self.cycle is None:
            self.transport.close()


def _run_guarded(
    run: Callable[..., None], folder: ServerFolder, app: ASGIApp, **options: Any
) -> None:
    # No proxy says for whom it asks: what it said would be believed. The other parser of HTTP
    # takes heads of any length.
    own = {"proxy_headers": False, "access_log": False, "http": _PromptHead, "ws": "none"}
    run(NodesAlone(app, folder), **{**options, **own, **_all_addresses()})


class _Walk(threading.local):
    """How far a thread has walked through the tree of a message's parts."""

    nodes = levels = 0


_walk = _Walk()


def _bounded(
    get_object_tree: Callable[[InMemoryObjectStore, str], ObjectTree],
) -> Callable[[InMemoryObjectStore, str], ObjectTree]:
    """Flower's ``get_object_tree``, which raises ``NoObjectInStoreError`` for a tree of more than
    ``MOST_PARTS`` nodes or ``_MOST_LEVELS`` levels: Flower then drops the message.

    Flower 1.41 and 1.42 keep a part's children from the first message that names the part, and
    list them again wherever another part names it: a few kilobytes make 2 to the power of 99 nodes,
    or more levels than the reader of the answer takes.
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
            return get_object_tree(store, object_id)  # which calls this again for each child
        finally:
            _walk.levels -= 1

    return bounded


def _start_own_superexec() -> None:
    """Replace the command by which Flower's SuperLink starts a SuperExec."""
    flower = import_module(flower_superlink.__module__)  # whose package has a function of its name
    command_of = flower._get_superexec_command

    def command(**options: Any) -> list[str]:
        return [sys.executable, "-P", "-m", "server_app.superexec", *command_of(**options)[1:]]

    setattr(flower, command_of.__name__, command)


def main() -> None:
    """Run a SuperLink until it is asked to end, or its parent has ended."""
    end_with_parent(int(sys.argv.pop(1)))
    _start_own_superexec()
    if (folder := own_folder()) is not None:  # else a simulation's, which listens on loopback
        uvicorn.run = partial(_run_guarded, uvicorn.run, folder)
        trees = _bounded(InMemoryObjectStore.get_object_tree)
        InMemoryObjectStore.get_object_tree = trees  # type: ignore[method-assign, assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
