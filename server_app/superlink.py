"""Flower's SuperLink, of which other machines reach no more than nodes need.

A SuperLink has one port for nodes, for who submits runs and for its own apps, and asks only nodes
who they are: whoever reaches it could submit a run, which is code. Here a request from another
machine gets no further than the nodes' part; who submits does so on this machine, or comes through
a tunnel of ssh. ``python -m server_app.superlink`` takes the options of ``flower-superlink``.
"""

import ipaddress
from typing import Any

import uvicorn
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_NODES = "/v1/fleet/"


class NodesAlone:
    """Passes on to ``app`` what comes from this machine, and of others what nodes ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_own(scope) or scope["path"].startswith(_NODES):
            await self._app(scope, receive, send)
        else:
            refused = PlainTextResponse("only on the SuperLink's own machine", 403)
            await refused(scope, receive, send)


def _is_own(scope: Scope) -> bool:
    client = scope.get("client")
    return client is not None and ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    """Run a SuperLink until it is asked to end."""
    run = uvicorn.run

    def guarded(app: ASGIApp, **options: Any) -> None:
        # No proxy says for whom it asks: what it said would be believed.
        run(NodesAlone(app), **{**options, "proxy_headers": False, "access_log": False})

    uvicorn.run = guarded  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
