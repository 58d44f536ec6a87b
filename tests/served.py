"""A deployed server without a SuperLink, to test its replies to units and to this machine."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from collapipe.deployment.server_folder import ServerFolder
from server_app.guard import NodesAlone


@contextmanager
def serving(folder: ServerFolder) -> Iterator[None]:
    """Serve the guard with an empty app in place of a SuperLink, with the server's certificate."""
    options = uvicorn.Config(
        NodesAlone(Starlette(), folder),
        port=folder.settings().port,
        ssl_keyfile=str(folder.key),
        ssl_certfile=str(folder.certificate),
        log_level="critical",
        ws="none",
    )
    server = uvicorn.Server(options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
