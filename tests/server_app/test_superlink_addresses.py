"""A deployed server listens to IPv6, too."""

import asyncio
import socket

import pytest
import uvicorn

from server_app.superlink import _all_addresses


@pytest.mark.skipif(not _all_addresses(), reason="this machine has no IPv6")
def test_units_reach_the_superlink_by_either_protocol() -> None:
    async def app(*_: object) -> None: ...

    async def dial() -> list[str]:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        options = {"host": "0.0.0.0", **_all_addresses()}
        server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", **options))
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
