"""``python -m server_app.guard PARENT OPTIONS…``: Flower's SuperLink, of which other machines reach
only the interface for nodes.

A SuperLink has a single port for nodes, for users who submit runs, and for its own apps, and it
authenticates only nodes. Anyone who reaches the port could therefore submit a run, which is code.
The guard restricts requests from other machines to the nodes' interface, and requires the signature
of an admitted unit. It checks the signature first, because Flower reads a whole request before it
authenticates the sender. Users submit runs on this machine or through an SSH tunnel.
"""

import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

import collapipe
from collapipe.credentials.keys import fingerprint
from collapipe.deployment.run_archive import pack
from collapipe.deployment.server_folder import ADMITTED, CONTROL, RUNS, ServerFolder, own_folder
from collapipe.errors import ConfigError
from collapipe.flower import superlink
from collapipe.flower.requests import (
    FLEET,
    PUSH_PART,
    PUSH_REPLY,
    are_own_replies,
    ask_control,
    has_short_head,
    has_signed,
    shown_key,
)
from server_app.refusals import Refusals

_log = logging.getLogger(__name__)
_METRICS = "/metrics"
_NUMBER, _MARK = re.compile(r"[0-9]{1,20}"), re.compile(r"\.[0-9a-f]{32}")
_MOST_BYTES = 80 * 2**20  # a part of a reply: all words of rows are one part; arrays use 5 MiB ones
_SMALL_BYTES = 2**20  # any other request, and replies before any run has asked a question
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
            answer = JSONResponse(self._admission(scope, path.removeprefix(ADMITTED)))
        elif scope["type"] == "http" and path.startswith(FLEET):
            answer = self._refusal(scope, Headers(scope=scope)) or self._app
        elif scope["type"] != "lifespan" and not _is_own(scope):
            self._refusals.note(_host(scope), "it requested an interface that units do not need")
            answer = PlainTextResponse("only available on the SuperLink's machine", 403)
        elif path == _METRICS:
            metrics = self._folder.metrics
            answer = PlainTextResponse(metrics.read_text() if metrics.exists() else "")
        elif path.startswith(CONTROL):
            request = Request(scope, receive)
            method = path.removeprefix(CONTROL)
            answer = await ask_control(self._app, method, await request.body())
        elif path.startswith(RUNS):
            mark = scope["query_string"].decode("ascii", "replace")
            answer = _run(self._folder, path.removeprefix(RUNS), mark)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """Check a request by its head, before its body is read. Returns the app that answers a
        refused request or checks its body; None if the request may pass."""
        known = self._folder.nodes()
        if known is None:  # nodes try again after 503
            return PlainTextResponse("units are being admitted", 503)
        key = shown_key(headers)
        if key is None or fingerprint(key) not in known or not has_signed(key, headers):
            shown = "no key of a unit" if key is None else f"key {fingerprint(key)}"
            self._refusals.note(_host(scope), f"{shown}; it is not admitted, or has not signed")
            return PlainTextResponse("not an admitted unit", 401)
        length, path = headers.get("Content-Length", ""), scope["path"]
        most = _MOST_BYTES if path == PUSH_PART else _SMALL_BYTES
        chunked = "Transfer-Encoding" in headers  # h11 then ignores Content-Length
        if chunked or not length.isdecimal() or int(length) > most:
            return PlainTextResponse(f"chunked, more than {most} bytes, or no Content-Length", 413)
        own = fingerprint(key)
        if path in (PUSH_REPLY, PUSH_PART) and not self._has_room(own, int(length)):
            self._refusals.note(_host(scope), f"key {own} sent more than the largest reply")
            return PlainTextResponse("more than the largest reply of any run", 413)
        if path == PUSH_REPLY:
            check = partial(are_own_replies, known[own])
            return _Checked(self._app, check, "not the node's own reply")
        if path == PUSH_PART:
            return _Checked(self._app, has_short_head, "the part's head is too long")
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

    def _admission(self, scope: Scope, key: str) -> dict[str, object]:
        """Return versions, and whether ``key`` is ``admitted``; None while the server starts."""
        versions = {"collapipe": collapipe.__version__, "flwr": version("flwr")}
        known = self._folder.nodes()
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
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> ASGIMessage:
            return next(whole, None) or await receive()

        return await self.app(scope, again, send)


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


def _host(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _is_own(scope: Scope) -> bool:
    host = _host(scope)
    return bool(host) and ipaddress.ip_address(host).is_loopback


def main() -> None:
    """Run the SuperLink of this process's server folder."""
    folder = own_folder()
    assert folder is not None  # deploy serve names it
    superlink.run(partial(NodesAlone, folder=folder))


if __name__ == "__main__":
    main()
