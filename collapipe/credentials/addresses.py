"""Addresses HOST:PORT, and which of them lead to this box alone."""

import re
from ipaddress import ip_address

from collapipe.errors import ConfigError

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([^\s\[\]:/@%]+)):(\d{1,5})", re.ASCII)


def host_and_port(address: str) -> tuple[str, int]:
    """Both parts of an address. Raises ``ConfigError`` for one of another form."""
    found = _ADDRESS.fullmatch(address)
    if not found or int(found[3]) > 65535:
        raise ConfigError(f"address {address!r}: must be HOST:PORT, or [HOST]:PORT for IPv6")
    return found[1] or found[2], int(found[3])


def require_loopback(address: str) -> None:
    """Raise ``ConfigError`` where ``--insecure`` would let other machines in."""
    host, _ = host_and_port(address)
    if host != "localhost" and not _is_loopback(host):
        raise ConfigError(
            f"--insecure on {address}: only 127.0.0.0/8, ::1 and localhost may go without "
            "certificates; make some: collapipe credentials add"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, whatever it leads to
        return False
