"""Dial a device, and check that it is the right one and that its certificate is not revoked."""

import re
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

import grpc

from collapipe.credentials.bundle import CERTIFICATE, KEY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Role, check_name, dns_name
from collapipe.errors import ConfigError, LinkError, WireError

_OTHER_NAME = 62  # X509_V_ERR_HOSTNAME_MISMATCH of OpenSSL
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([\w.-]+)):(\d{1,5})", re.ASCII)


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ``ConfigError`` for an address of another form."""
    found = _ADDRESS.fullmatch(address)
    if not found or int(found[3]) > 65535 or not _is_host(found[1], found[2]):
        raise ConfigError(
            f"address {address!r}: must be HOST:PORT, such as 10.0.0.5:7700, or [HOST]:PORT for "
            f"IPv6{_ascii_form(address)}"
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


def require_loopback(address: str) -> None:
    """Raise ``ConfigError`` if ``--insecure`` would accept connections of other machines."""
    host, _ = host_and_port(address)
    try:
        here = ip_address(host).is_loopback
    except ValueError:  # a name
        here = host == "localhost"
    if not here:
        raise ConfigError(
            f"--insecure on {address}: only 127.0.0.0/8, ::1 and localhost may go without "
            "certificates; make some: collapipe credentials add"
        )


def dial(
    credentials: Credentials,
    address: str,
    name: str,
    timeout_s: float,
    options: Sequence[tuple[str, object]],
) -> tuple[grpc.Channel, bytes]:
    """Open a channel to the device ``name`` at ``address`` (HOST:PORT), after a check of its
    certificate (PEM), which is returned, too.

    The channel trusts only this certificate, also when it reconnects. After a renewal the caller
    must dial again. Raises ``LinkError`` with the cause if either end refuses the other, and
    ``ConfigError`` for an invalid name or address.
    """
    wanted = dns_name(check_name(name), Role.DEVICE)
    try:
        shown = _shown(credentials, address, wanted, timeout_s)
        credentials.check(shown)
    except (OSError, WireError) as error:
        raise LinkError(f"device {name} at {address}: {cause(error)}") from error
    pinned = [*options, ("grpc.ssl_target_name_override", wanted)]
    return grpc.secure_channel(address, credentials.channel(shown), options=pinned), shown


def cause(error: OSError | WireError) -> str:
    """Return why a connection failed, without the system's error number, and what to check."""
    match error:
        case ssl.SSLCertVerificationError():
            other = "; another one answers there" if error.verify_code == _OTHER_NAME else ""
            return f"its certificate is refused: {error.verify_message}{other}"
        case ssl.SSLError():
            return f"TLS fails ({error.reason}); was it started with --credentials?"
        case TimeoutError():
            return "timed out"
        case ConnectionRefusedError():
            return "Connection refused; start `collapipe device` there, or correct the address"
        case socket.gaierror():
            return f"{error.strerror}; correct the address"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _shown(credentials: Credentials, address: str, server_name: str, timeout_s: float) -> bytes:
    """Return the certificate (PEM) of a server that accepted ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority.decode())
    context.load_cert_chain(credentials.folder / CERTIFICATE, credentials.folder / KEY)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(host_and_port(address), timeout_s) as connection,
        context.wrap_socket(
            connection, server_hostname=server_name, do_handshake_on_connect=False
        ) as secured,
    ):
        late = threading.Timer(1.2 * timeout_s, _end, (secured,))  # a slow peer
        late.start()
        try:
            secured.do_handshake()
            shown, spoke = secured.getpeercert(binary_form=True), _spoke(secured)
        finally:
            late.cancel()
            late.join()
    assert shown is not None
    if not spoke:
        raise WireError(
            f"closed the connection on {credentials.member}; is its certificate of the same "
            "authority, and are the clocks right?"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _end(connection: ssl.SSLSocket) -> None:
    with suppress(OSError):  # the connection has ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # wakes the waiting thread


def _spoke(secured: ssl.SSLSocket) -> bool:
    """Whether the server accepted our certificate: then it sends the first HTTP/2 frame."""
    try:
        return bool(secured.recv(1))
    except (ConnectionError, ssl.SSLError):
        return False
