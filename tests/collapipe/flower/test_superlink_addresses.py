"""A deployed server listens on IPv4 and IPv6 and closes connections that send no request."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from collapipe.flower import superlink
from collapipe.flower.superlink import _all_addresses

NO_BODY = b"content-length", b"0"


@pytest.mark.skipif(not _all_addresses(), reason="this machine has no IPv6")
def test_units_reach_the_superlink_over_ipv4_and_ipv6() -> None:
    async def app(*_: object) -> None: ...

    async def dial() -> list[str]:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        options = {"host": "0.0.0.0", **_all_addresses()}
        server = uvicorn.Server(
            uvicorn.Config(app, port=port, lifespan="off", ws="none", **options)
        )
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reached = []
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, port)
            reached.append(str(writer.get_extra_info("peername")[0]))
            writer.close()
        server.should_exit = True
        await running
        return reached

    assert asyncio.run(dial()) == ["127.0.0.1", "::1"]


@pytest.mark.parametrize("answered", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: a"])
def test_a_connection_without_a_complete_request_header_is_closed(
    sent: bytes, answered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a first request that was answered; idle connections close after a second then."""
    monkeypatch.setattr(superlink, "_HEAD_S", 0.05)
    given = dict[str, Any]()
    superlink._run_guarded(lambda app, **options: given.update(options), lambda app: app, None)  # type: ignore[arg-type]

    async def reply(scope: object, receive: object, send: Callable[[Any], Any]) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [NO_BODY]})
        await send({"type": "http.response.body"})

    async def dial() -> bytes:
        idle_s = 1
        config = uvicorn.Config(
            reply, http=given["http"], lifespan="off", timeout_keep_alive=idle_s
        )
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        serving = await loop.create_server(
            lambda: given["http"](config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*serving.sockets[0].getsockname())
        if answered:
            writer.write(answered)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        writer.write(sent)
        got = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        serving.close()
        return got

    assert asyncio.run(dial()) == b""
