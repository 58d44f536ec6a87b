"""A slow connection, as over a slow uplink or on a busy machine."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress

import grpc

from collapipe.wire.link import SERVER_NAME, self_signed
from collapipe.wire.streams.channels import CHANNEL_OPTIONS

DELAY_S = 0.3  # for each packet of the handshake


def test_a_connection_may_take_seconds() -> None:
    """gRPC aborts an attempt to connect after its minimum reconnect backoff."""
    key, certificate = self_signed()
    with echo_server(key, certificate) as port, slow_proxy(port) as address:
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
        credentials = grpc.ssl_channel_credentials(certificate)
        with grpc.secure_channel(address, credentials, options=options) as channel:
            assert channel.unary_unary("/service/echo")(b"ping") == b"ping"


@contextmanager
def echo_server(key: bytes, certificate: bytes) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(lambda message, _: message)
    service = grpc.method_handlers_generic_handler("service", {"echo": handler})
    server.add_generic_rpc_handlers((service,))
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield port
    server.stop(0).wait()


@contextmanager
def slow_proxy(port: int) -> Iterator[str]:
    """The address of a proxy that forwards data ``DELAY_S`` later, for one connection."""

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                time.sleep(DELAY_S)
                target.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=forward, args=(client, server), daemon=True).start()
            forward(server, client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
