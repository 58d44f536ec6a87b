"""Host names are resolved as by the operating system."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

CONNECT = """
import sys, collapipe, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    grpc.channel_ready_future(channel).result(2)
"""


def test_a_second_address_of_a_name_is_dialled_if_the_first_refuses(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.2 box.example\n127.0.0.1 box.example\n")
    own = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run([*own, f"mount --bind {hosts} /etc/hosts"]).returncode:
        pytest.skip("mount namespaces are not allowed")
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"box.example:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    command = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    found = [sys.executable, "-c", CONNECT, address]
    ended = subprocess.run([*own, command, "sh", *found], capture_output=True, text=True)
    server.stop(None)
    assert not ended.returncode, ended.stderr
