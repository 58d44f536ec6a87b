"""Addresses, and which of them are this box alone."""

import pytest

from collapipe.credentials.addresses import host_and_port, require_loopback
from collapipe.errors import ConfigError


@pytest.mark.parametrize(
    "address", ["127.0.0.1:50", "127.9.9.9:0", "[::1]:65535", "localhost:7000"]
)
def test_loopback_may_go_without_certificates(address: str) -> None:
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
def test_all_else_is_refused(address: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_loopback(address)
    assert repr(address)[1:-1] in str(error.value)


def test_an_address_has_two_parts() -> None:
    assert host_and_port("jetson.local:7000") == ("jetson.local", 7000)
    assert host_and_port("[fd00::2]:7000") == ("fd00::2", 7000)
