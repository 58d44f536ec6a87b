"""A sender may be only a few messages ahead of its reader."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc

from collapipe.wire.streams.channels import DAEMON_OPTIONS, DEVICE_OPTIONS
from collapipe.wire.streams.pieces import PIECE_BYTES

_READ = 200  # messages that are read at once, so that gRPC assumes a fast link
_MOST_AHEAD = 3  # messages that the reader has not taken


def test_a_device_that_does_not_read_gets_few_messages() -> None:
    """Waiting messages take the device's memory and delay signs of life on a slow link."""
    may_read, read, sent = threading.Semaphore(_READ), threading.Event(), itertools.count()

    def take(messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for number, _message in enumerate(messages, 1):
            if number == _READ:
                read.set()
            if not may_read.acquire(timeout=60):
                break
        yield b""

    def pieces() -> Iterator[bytes]:
        while True:
            next(sent)
            yield bytes(PIECE_BYTES)

    handler = grpc.stream_stream_rpc_method_handler(take)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=DAEMON_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Stream", {"take": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=DEVICE_OPTIONS) as channel:
            call = channel.stream_stream("/test.Stream/take")(pieces())
            assert read.wait(60)
            time.sleep(1)  # without the options, 5 to 20 MB arrive meanwhile
            assert next(sent) <= _READ + 1 + _MOST_AHEAD
            call.cancel()
    finally:
        server.stop(0).wait()
        may_read.release()
