"""Seconds of a hop over a link of 100 Mbit/s, encrypted, against the same bytes over plain TCP.
Time runs from sending an activation to its acknowledgement."""

import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from benchmarks.arguments import at_least
from benchmarks.devices.hop_end import LENGTH, MOST
from benchmarks.devices.sides import about, ratio, save, turns
from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority
from collapipe.credentials.credentials import load
from collapipe.wire import frames
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import Dialer, open_stream
from collapipe.wire.streams.data_port import DataRoute
from pipeline.devices.messages import HOP
from tests.network import network

DEVICE = "device-0"


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for rate and sizes."""
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--shape", type=at_least(1), nargs=3, default=[8, 64, 768])


def main(arguments: Namespace) -> None:
    activation = torch.randn(arguments.shape)
    mask = torch.ones(arguments.shape[:2], dtype=torch.bool)
    frame = Frame(FrameKind.ACTIVATION, 0, 0, 0, (activation, mask))
    raw = b"".join(frames.buffers(frame))
    line_s = len(raw) * 8 / (arguments.mbit * 1e6)
    with tempfile.TemporaryDirectory() as folder, network(1, arguments.mbit * 1e6) as made:
        credentials = temporary_authority(Path(folder) / "credentials", [DEVICE])
        (place,) = made.places
        command = [*place.command, sys.executable, "-m", "benchmarks.devices.hop_end", place.host]
        command.append(str(credentials[DEVICE]))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as end:
            try:
                assert end.stdout is not None
                port, plain = map(int, end.stdout.readline().split())
                channel = Dialer(load(credentials[CONTROL_UNIT])).channel(
                    DEVICE, f"{place.host}:{port}"
                )
                route = DataRoute(DEVICE, place.host)
                stream = open_stream(channel, HOP, DEVICE, MOST, threading.Event(), route=route)
                with socket.create_connection((place.host, plain)) as connection, channel:
                    head = len(raw).to_bytes(LENGTH)

                    def tcp() -> None:
                        connection.sendall(head)
                        connection.sendall(raw)
                        connection.recv(1)

                    def tls() -> None:
                        stream.send(frame)
                        stream.receive()

                    sides = {"stream": tls, "tcp": tcp}
                    seconds, _ = turns(sides, arguments.turns, {})
            finally:
                end.kill()
    against = ratio(seconds["stream"], seconds["tcp"])
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{len(raw):,} bytes at {arguments.mbit:g} Mbit/s, which take {line_s * 1e3:.1f} ms")
    print(f"stream {middle['stream'] * 1e3:.1f} ms, TCP {middle['tcp'] * 1e3:.1f} ms: {against}")
    save(arguments.output, "hop", {"about": about(arguments), "line_s": line_s, **seconds})
