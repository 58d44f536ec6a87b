"""Addresses of devices and servers: HOST:PORT."""

import re
from contextlib import suppress
from ipaddress import ip_address

from collapipe.errors import ConfigError

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([\w.-]+)):(\d{1,5})", re.ASCII)


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ``ConfigError`` for an address of another form."""
    found = _ADDRESS.fullmatch(address)
    if not found or int(found[3]) > 65535 or not _is_host(found[1], found[2]):
        raise ConfigError(
            f"address {address!r}: must be HOST:PORT, such as 10.0.0.5:7700, or [HOST]:PORT for "
            "IPv6 without a zone, with a port up to 65535" + _ascii_form(address)
        )
    return found[1] or found[2], int(found[3])


def _is_host(numbers: str | None, name: str) -> bool:
    """Whether ``numbers`` is an IPv6 address or, without it, ``name`` is a valid host name."""
    try:
        return bool(ip_address(numbers) if numbers else name.encode("idna"))
    except ValueError:  # UnicodeError is one
        return False


def _ascii_form(address: str) -> str:
    """Return a hint with the ASCII form of a host name that has other letters, else "".
    Certificates and gRPC know ASCII names only."""
    name, _, port = address.rpartition(":")
    with suppress(UnicodeError):
        known = name.encode("idna").decode("ascii")
        if not name.isascii() and known.encode("ascii").decode("idna") == name.lower():
            return f"; other letters in ASCII: {known}:{port}"
    return ""
