"""The receiver of a hop, which benchmarks/devices/hop.py starts. It acknowledges frames of a stream
with mutual TLS, and the same number of bytes from a TCP connection.

    python -m benchmarks.devices.hop_end HOST CREDENTIALS

Prints the ports of both.
"""

import socket
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc

from collapipe.credentials.credentials import load
from collapipe.errors import LinkError
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import DAEMON_OPTIONS, serve_stream
from collapipe.wire.streams.data_port import DataPort
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.messages import HOP

LENGTH = 8  # size of the length prefix, in bytes
MOST = 2**30


def main() -> None:
    host, credentials = sys.argv[1:]
    server = grpc.server(futures.ThreadPoolExecutor(2), options=DAEMON_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(partial(_stream, DataPort(host, 0)))
    service, _, method = HOP.removeprefix("/").partition("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_secure_port(f"{host}:0", load(Path(credentials)).server())
    server.start()
    with socket.create_server((host, 0)) as listening:
        print(port, listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        with connection:
            _answer(connection)


def _stream(
    port: DataPort, messages: Iterator[bytes], context: grpc.ServicerContext
) -> Iterator[bytes]:
    stream = FrameStream("hop", MOST)
    threading.Thread(target=_reply, args=(stream,), daemon=True).start()
    yield from serve_stream(stream, messages, context, port)


def _reply(stream: FrameStream) -> None:
    with suppress(LinkError):
        while True:
            frame = stream.receive()
            stream.send(Frame(FrameKind.READY, frame.round, frame.step, 0))


def _answer(connection: socket.socket) -> None:
    """Acknowledge each message until the connection closes."""
    while head := connection.recv(LENGTH, socket.MSG_WAITALL):
        left = int.from_bytes(head)
        while left:
            left -= len(connection.recv(min(left, 2**20)))
        connection.sendall(b"\0")


if __name__ == "__main__":
    main()
