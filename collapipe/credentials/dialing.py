"""Dial a device: it must be the one that is meant, and its certificate must not be revoked."""

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc

from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.bundle import CERTIFICATE, KEY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Role, check_name, dns_name
from collapipe.errors import LinkError, WireError

_TIMEOUT_S = 10.0


def dial(
    credentials: Credentials,
    address: str,
    name: str,
    options: Sequence[tuple[str, object]] = (),
    timeout_s: float = _TIMEOUT_S,
) -> grpc.Channel:
    """A channel to the device ``name`` at ``address`` (HOST:PORT), wherever that leads.

    A first handshake fetches and checks the certificate; the channel then trusts this one alone,
    also when it connects again. A device that has renewed it is dialled again. Raises ``LinkError``
    with the cause where the device, or this member, is refused; ``ConfigError`` for a bad name or
    address.
    """
    wanted = dns_name(check_name(name), Role.DEVICE)
    try:
        shown = _shown(credentials, address, wanted, timeout_s)
        credentials.check(shown)
    except (OSError, WireError) as error:
        cause = getattr(error, "verify_message", "") or error
        raise LinkError(f"device {name} at {address}: {cause}") from error
    pinned = [*options, ("grpc.ssl_target_name_override", wanted)]
    return grpc.secure_channel(address, credentials.channel(shown), options=pinned)


def _shown(credentials: Credentials, address: str, server_name: str, timeout_s: float) -> bytes:
    """The certificate (PEM) of a server that took ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority.decode())
    context.load_cert_chain(credentials.folder / CERTIFICATE, credentials.folder / KEY)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(host_and_port(address), timeout_s) as connection,
        _ended_after(timeout_s, connection),
        context.wrap_socket(connection, server_hostname=server_name) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        if not _spoke(secured):
            raise WireError(
                f"closed the connection on {credentials.member}; is its certificate of the same "
                "authority, and are the clocks right?"
            )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


@contextmanager
def _ended_after(timeout_s: float, connection: socket.socket) -> Iterator[None]:
    """The connection lasts no longer, also where the other end sends a byte now and then."""
    with connection.dup() as own:  # whoever wraps the socket closes it

        def end() -> None:
            with suppress(OSError):  # it has ended
                own.shutdown(socket.SHUT_RDWR)

        late = threading.Timer(timeout_s, end)
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()


def _spoke(secured: ssl.SSLSocket) -> bool:
    """Whether the server took our certificate: then it speaks first, in HTTP/2."""
    try:
        return bool(secured.recv(1))
    except (ConnectionError, ssl.SSLError):
        return False
