"""Flower's SuperLink, of which other machines reach no more than nodes need.

A SuperLink has one port for nodes, for who submits runs and for its own apps, and asks only nodes
who they are: whoever reaches it could submit a run, which is code. Here a request from another
machine gets no further than the nodes' part; who submits does so on this machine, or comes through
a tunnel of ssh. ``python -m server_app.superlink PARENT OPTIONS…`` takes the options of
``flower-superlink`` and ends with the process PARENT.
"""

import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import Any

import flwr
import uvicorn
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import collapipe
from collapipe.deployment.server_folder import ADMITTED, METRICS_FILE, NODES

_FLEET = "/v1/fleet/"
_METRICS = "/metrics"


class NodesAlone:
    """Passes on to ``app`` what comes from this machine, and of others what nodes ask.

    Tells who knows the serial number of a unit's certificate whether the unit is among the
    ``nodes``, a file, and which versions are here; and Prometheus, on this machine, the ``metrics``
    of the last round, another file.
    """

    def __init__(self, app: ASGIApp, nodes: Path, metrics: Path) -> None:
        self._app, self._nodes, self._metrics = app, nodes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(ADMITTED):
            await JSONResponse(self._told(path.removeprefix(ADMITTED)))(scope, receive, send)
        elif path == _METRICS and _is_own(scope):
            await PlainTextResponse(_text(self._metrics))(scope, receive, send)
        elif scope["type"] == "lifespan" or _is_own(scope) or path.startswith(_FLEET):
            await self._app(scope, receive, send)
        else:
            refused = PlainTextResponse("only on the SuperLink's own machine", 403)
            await refused(scope, receive, send)

    def _told(self, serial: str) -> dict[str, object]:
        known = json.loads(_text(self._nodes) or "{}")
        versions = {"collapipe": collapipe.__version__, "flwr": flwr.__version__}
        return {**versions, "admitted": serial in known}


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _is_own(scope: Scope) -> bool:
    client = scope.get("client")
    return client is not None and ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    """Run a SuperLink until it is asked to end, or its parent has ended."""
    start_parent_process_monitor(int(sys.argv.pop(1)))
    run, nodes = uvicorn.run, Path(os.environ["FLWR_HOME"]) / NODES
    metrics = Path(os.environ[METRICS_FILE])

    def guarded(app: ASGIApp, **options: Any) -> None:
        # No proxy says for whom it asks: what it said would be believed.
        run(
            NodesAlone(app, nodes, metrics),
            **{**options, "proxy_headers": False, "access_log": False},
        )

    uvicorn.run = guarded  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
