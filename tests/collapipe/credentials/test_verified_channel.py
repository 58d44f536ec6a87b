"""Addresses: parsing, which ones are loopback, and errors if no server answers."""

import socket
from pathlib import Path

import pytest

from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.authority import temporary_authority
from collapipe.credentials.credentials import load
from collapipe.credentials.verified_channel import require_loopback
from collapipe.errors import ConfigError, LinkError
from collapipe.wire.streams.channels import Dialer


@pytest.mark.parametrize(
    "address", ["127.0.0.1:50", "127.9.9.9:0", "[::1]:65535", "LocalHost:7000"]
)
def test_loopback_addresses_need_no_certificates(address: str) -> None:
    require_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:50",
        "[::]:50",
        "192.168.1.2:50",
        "128.0.0.1:50",
        "[::ffff:192.168.1.2]:50",
        "127.0.0.1.example.org:50",
        "localhost.example.org:50",
        "127.1:50",
        "jetson:50",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:70000",
        "me@127.0.0.1:50",
        "127.0.0.1:50/x",
        "127.0.0.1:50\n",
        "dns:127.0.0.1:50",
        "unix:/tmp/socket",
        "::1:50",
        "",
    ],
)
def test_addresses_other_than_loopback_are_refused(address: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_loopback(address)
    assert repr(address)[1:-1] in str(error.value)


def test_an_address_is_split_into_host_and_port() -> None:
    assert host_and_port("jetson.local:7000") == ("jetson.local", 7000)
    assert host_and_port("[fd00::2]:7000") == ("fd00::2", 7000)
    with pytest.raises(ConfigError, match="65535"):
        host_and_port("jetson:70000")


def test_a_stopped_and_a_missing_server_have_different_errors(tmp_path: Path) -> None:
    """For a stopped process, the operating system accepts connections but sends no data."""
    own = load(temporary_authority(tmp_path / "own", ["jetson"])["control-unit"])
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(LinkError, match=r"jetson at .*timed out$"):
            Dialer(own, 0.2).channel("jetson", address)
    with pytest.raises(LinkError, match=r": Connection refused; .*collapipe device"):
        Dialer(own, 0.2).channel("jetson", address)
