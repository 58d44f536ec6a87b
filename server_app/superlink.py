"""Flower's SuperLink behind a guard: other machines can only reach the interface for nodes.

A SuperLink has a single port for nodes, for users who submit runs, and for its own apps, and it
authenticates only nodes. Anyone who reaches the port could therefore submit a run, which is code.
The guard restricts requests from other machines to the nodes' interface, and requires the signature
of an admitted unit. It checks the signature first, because Flower reads a whole request before it
authenticates the sender. Users submit runs on this machine or through an SSH tunnel.

``python -m server_app.superlink PARENT OPTIONS…`` takes the options of ``flower-superlink`` and
ends with the process PARENT.
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
from collapipe.process.children import end_with_parent
from server_app.refusals import Refusals
from server_app.reply_limit import MOST_PARTS

_log = logging.getLogger(__name__)
_FLEET = "/v1/fleet/"
_METRICS = "/metrics"
_NUMBER, _MARK = re.compile(r"[0-9]{1,20}"), re.compile(r"\.[0-9a-f]{32}")
_PUSHES = "/v1/fleet/push-messages", "/v1/fleet/push-object"  # a reply, and its parts
_MOST_BYTES = 80 * 2**20  # a part of a reply: all words of rows are one part; arrays use 5 MiB ones
_SMALL_BYTES = 2**20  # any other request, and replies before any run has asked a question
_HEAD_BYTES = 2**20  # a part's head, up to its first zero; Flower expands it up to 27 times
_MOST_LEVELS = 16  # levels in the tree of a message's parts; Flower's messages have 5
_HEAD_S = 60.0  # time from a connection to the end of its first request's head
_SHARE = 2  # a node may send this multiple of the largest reply, because it repeats broken pushes


class NodesAlone:
    """Forwards requests from this machine and from admitted units to ``app``.

    Any caller can ask whether a key's fingerprint is admitted in ``folder``, and which versions run
    here. For each question a node can send at most ``_SMALL_BYTES`` plus ``_SHARE`` times the
    largest reply to any question so far. It can only send replies in its own name. Callers on this
    machine can also fetch the last round's metrics and runs' folders; as they may submit runs, they
    could read these anyway. The log names each refused caller once.
    """

    def __init__(self, app: ASGIApp, folder: ServerFolder) -> None:
        self._app, self._folder, self._refusals = app, folder, Refusals(_log)
        self._questions: object = None  # the last questions when bytes were counted
        self._sent = Counter[str]()  # bytes of replies to these questions, by the sender's key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        answer: ASGIApp = self._app
        if scope["type"] == "http" and path.startswith(ADMITTED):
            answer = JSONResponse(self._told(scope, path.removeprefix(ADMITTED)))
        elif scope["type"] == "http" and path.startswith(_FLEET):
            answer = self._refusal(scope, Headers(scope=scope)) or self._app
        elif scope["type"] != "lifespan" and not _is_own(scope):
            self._refusals.note(_host(scope), "it requested an interface that units do not need")
            answer = PlainTextResponse("only available on the SuperLink's machine", 403)
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
        """Forward a request in JSON to a ``method`` of Flower's Control API, such as
        ``list-nodes``, and return Flower's answer as JSON. Commands on this machine use this to
        avoid importing Flower, which takes seconds."""
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
        """Check a request by its head, before its body is read. Returns the app that answers a
        refused request or checks its body; None if the request may pass."""
        known = self._known()
        if known is None:  # nodes try again after 503
            return PlainTextResponse("units are being admitted", 503)
        key = _shown(headers)
        if key is None or fingerprint(key) not in known or not _has_signed(key, headers):
            shown = "no key of a unit" if key is None else _named(key)
            self._refusals.note(_host(scope), f"{shown}; it is not admitted, or has not signed")
            return PlainTextResponse("not an admitted unit", 401)
        length, path = headers.get("Content-Length", ""), scope["path"]
        most = _MOST_BYTES if path == _PUSHES[1] else _SMALL_BYTES
        if not length.isdecimal() or int(length) > most:
            return PlainTextResponse(f"more than {most} bytes, or no Content-Length", 413)
        if path in _PUSHES and not self._has_room(fingerprint(key), int(length)):
            self._refusals.note(_host(scope), f"{_named(key)} sent more than the largest reply")
            return PlainTextResponse("more than the largest reply of any run", 413)
        if path == _PUSHES[0]:
            node = str(known[fingerprint(key)])
            return _Checked(self._app, partial(_are_own_replies, node), "not the node's own reply")
        if path == _PUSHES[1]:
            refusal = f"the part's head exceeds {_HEAD_BYTES} bytes"
            return _Checked(self._app, _has_short_head, refusal)
        return None

    def _has_room(self, key: str, size: int) -> bool:
        """Count the bytes that a node has sent since the last question of any run. Returns whether
        they are within the limit, which the runs' ServerApps have noted."""
        expected = self._folder.expected_replies()
        if self._questions != expected:
            self._questions, self._sent = expected, Counter()
        most = _SMALL_BYTES + _SHARE * sum(most_bytes for _, most_bytes in expected.values())
        self._sent[key] += size
        return self._sent[key] <= most

    def _known(self) -> dict[str, object] | None:
        """Nodes of admitted units by the fingerprints of their keys; None while the server
        starts."""
        nodes = self._folder.flower_home / NODES
        return dict(json.loads(nodes.read_text())) if nodes.exists() else None

    def _told(self, scope: Scope, key: str) -> dict[str, object]:
        """Return the versions, and whether ``key`` is ``admitted`` (None while the server
        starts)."""
        versions = {"collapipe": collapipe.__version__, "flwr": flwr.__version__}
        known = self._known()
        if known is not None and key not in known:
            self._refusals.note(_host(scope), f"key {key} is not admitted")
        return {**versions, "admitted": None if known is None else key in known}


@dataclass(frozen=True, slots=True)
class _Checked:
    """Forwards a request to ``app`` if its body passes ``check``; else answers ``refusal``."""

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
    """Whether all messages in a request are replies of the node that sends it.

    Flower checks the sender of the request, but not of its messages: a node could send questions
    in the server's name, or replies in other nodes' names.
    """
    try:
        messages = PushMessagesRequest.FromString(body).messages_list
    except DecodeError:
        return False
    found = [each.metadata for each in messages]
    return all(str(each.src_node_id) == node and each.reply_to_message_id for each in found)


def _has_short_head(body: bytes) -> bool:
    """Whether a part's head ends within ``_HEAD_BYTES``. The head lists the part's children; this
    size suffices for the largest allowed reply."""
    try:
        part = PushObjectRequest.FromString(body).object_content
    except DecodeError:
        return False
    return bool(part.find(b"\0", 0, _HEAD_BYTES) >= 0)


def _named(key: EllipticCurvePublicKey) -> str:
    """The text for a key in the log."""
    return f"key {fingerprint(key)}"


def _run(folder: ServerFolder, number: str, mark: str) -> Response:
    """Return the run's folder as an archive. If the folder has the caller's file ``mark``, the
    caller can read it directly, and the answer is empty (204)."""
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
    """The public key in a request's header, which need not belong to the sender."""
    try:
        key = load_pem_public_key(b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER]))
    except (KeyError, *UNREADABLE):
        return None
    return key if isinstance(key, EllipticCurvePublicKey) else None


def _has_signed(key: EllipticCurvePublicKey, headers: Headers) -> bool:
    """Whether the key has signed the request's timestamp; Flower checks that the time is recent."""
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
    """Return uvicorn's option to listen on IPv4 and IPv6 (an empty host) if this machine has
    IPv6."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        return {}
    return {"host": ""}


class _PromptHead(H11Protocol):
    """Closes a connection whose first request has no complete head after ``_HEAD_S``.

    Uvicorn waits for it without a limit, so unknown callers could exhaust the process's open files.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_HEAD_S, self._close_without_head)

    def _close_without_head(self) -> None:
        if self.cycle is None:
            self.transport.close()


def _run_guarded(
    run: Callable[..., None], folder: ServerFolder, app: ASGIApp, **options: Any
) -> None:
    # Headers of proxies are ignored, because any caller could forge them. h11 limits the length of
    # a request's head; uvicorn's other parser does not.
    own = {"proxy_headers": False, "access_log": False, "http": _PromptHead, "ws": "none"}
    run(NodesAlone(app, folder), **{**options, **own, **_all_addresses()})


class _Walk(threading.local):
    """The numbers of nodes and levels that a thread has visited in a tree of parts."""

    nodes = levels = 0


_walk = _Walk()


def _bounded(
    get_object_tree: Callable[[InMemoryObjectStore, str], ObjectTree],
) -> Callable[[InMemoryObjectStore, str], ObjectTree]:
    """Limit Flower's ``get_object_tree`` to ``MOST_PARTS`` nodes and ``_MOST_LEVELS`` levels.
    A larger tree raises ``NoObjectInStoreError``, and Flower drops the message.

    Flower 1.41 and 1.42 keep a part's children from the first message that names the part, and
    repeat them for every other part that names it. A few kilobytes can thus expand to 2**99 nodes,
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
        return [sys.executable, "-P", "-m", "server_app.superexec", *command_of(**options)[1:]]

    setattr(flower, command_of.__name__, command)


def main() -> None:
    """Run a SuperLink until it receives a signal or its parent process ends."""
    end_with_parent(int(sys.argv.pop(1)))
    _start_own_superexec()
    if (folder := own_folder()) is not None:  # a simulation's SuperLink listens only on loopback
        uvicorn.run = partial(_run_guarded, uvicorn.run, folder)
        trees = _bounded(InMemoryObjectStore.get_object_tree)
        InMemoryObjectStore.get_object_tree = trees  # type: ignore[method-assign, assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
