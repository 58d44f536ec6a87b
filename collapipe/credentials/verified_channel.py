"""Check both ends of a channel for what TLS does not check: roles and revocations.

A dialler checks that a device is the right one, and a server's ``Doorkeeper`` checks its callers.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

import grpc

from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.bundle import CERTIFICATE, KEY
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Member, Role, check_name, dns_name
from collapipe.errors import ConfigError, LinkError, WireError, cause_of

_MESSAGE_S = 5.0  # as long as a handshake may take
_OTHER_NAME = 62  # X509_V_ERR_HOSTNAME_MISMATCH of OpenSSL
_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its number or as ``localhost``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host.lower() == "localhost"


def require_loopback(address: str) -> None:
    """Raise ``ConfigError`` if ``--insecure`` would accept connections of other machines."""
    if not is_loopback(host_and_port(address)[0]):
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
        credentials.check(credentials.certificate)  # the handshake may have used a renewed one
    except (OSError, WireError) as error:
        raise LinkError(f"device {name} at {address}: {cause(error)}") from error
    pinned = [*options, ("grpc.ssl_target_name_override", wanted)]
    return grpc.secure_channel(address, credentials.channel(shown), options=pinned), shown


def cause(error: OSError | WireError) -> str:
    """Return why a connection failed, without the system's error number, and what to check."""
    match error:
        case ssl.SSLCertVerificationError():
            other = "; another one answers there" if error.verify_code == _OTHER_NAME else ""
            return f"its certificate is refused: {error.verify_message.rstrip('.')}{other}"
        case ssl.SSLError():
            return f"TLS fails ({error.reason}); was it started with --credentials?"
        case TimeoutError():
            return "timed out"
        case ConnectionRefusedError():
            return "Connection refused; start `collapipe device` there, or correct the address"
        case socket.gaierror():
            return f"{error.strerror}; correct the address"
    return cause_of(error)


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
            shown, accepted = secured.getpeercert(binary_form=True), _is_accepted(secured)
        finally:
            late.cancel()
            late.join()
    assert shown is not None
    if not accepted:
        raise WireError(
            f"closed the connection on {credentials.member}; is its certificate of the same "
            "authority, and are the clocks right?"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _end(connection: ssl.SSLSocket) -> None:
    with suppress(OSError):  # the connection has ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # wakes the waiting thread


def _is_accepted(secured: ssl.SSLSocket) -> bool:
    """Whether the server accepted our certificate: then it sends the first HTTP/2 frame."""
    try:
        return bool(secured.recv(1))
    except (ConnectionError, ssl.SSLError):
        return False


def _first(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """Return a call's message; end the call if there is none in time, because it holds a thread."""
    late = threading.Timer(_MESSAGE_S, context.cancel)
    late.daemon = True
    late.start()
    try:
        for message in messages:
            return message
    finally:
        late.cancel()
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
    raise AssertionError  # abort does not return


class Doorkeeper:
    """Refuses callers with UNAUTHENTICATED before it reads a message from them.

    TLS refuses a caller without a certificate, or with an expired one or another authority's. In
    Python gRPC cannot check revocations during the handshake. So a revoked member, or one whose
    role is not in ``roles``, completes the handshake, and each of its calls is refused. A stream
    that is open when the caller is revoked, or its certificate expires, ends within about a second,
    or at its next message on gRPC.
    """

    def __init__(self, credentials: Credentials, roles: Collection[Role]) -> None:
        self._credentials, self._roles = credentials, frozenset(roles)

    def guard(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return a handler that checks the caller first; unary and two-way streams only."""

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
            self._admitted(context)
            return handler.unary_unary(_first(messages, context), context)

        def carry(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
            self._admitted(context)
            self._look_after(context)
            return handler.stream_stream(self._watched(messages, context), context)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(carry)
        # as unary, gRPC would wait for the message, in one of few threads, before the check
        return grpc.stream_unary_rpc_method_handler(answer)

    def peer(self, auth_context: Mapping[str, Sequence[bytes]]) -> Member:
        """Return the caller, given ``ServicerContext.auth_context()``.

        Raises ``WireError`` if it has no valid certificate, is revoked or lacks the role.
        """
        shown = auth_context.get("x509_pem_cert", ())
        if len(shown) != 1:
            raise WireError("the caller has shown no certificate; dial with credentials")
        member = self._credentials.check(shown[0])
        if member.role not in self._roles:
            allowed = ", ".join(sorted(self._roles))
            raise WireError(f"{member}: may not call this; allowed: {allowed}")
        return member

    def _admitted(self, context: grpc.ServicerContext) -> None:
        try:
            self.peer(context.auth_context())
        except WireError as error:
            with suppress(Exception):  # gRPC's has no message for this machine's log
                context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise

    def _look_after(self, context: grpc.ServicerContext) -> None:
        """End a call once its caller is not admitted any more, even if no message is sent."""
        ended, shown = threading.Event(), context.auth_context()

        def look() -> None:
            while not ended.wait(0.5):
                try:
                    self.peer(shown)
                except WireError as error:
                    _log.info("%s", error)
                    context.cancel()
                    return

        if context.add_callback(ended.set):
            threading.Thread(target=look, daemon=True).start()

    def _watched(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the messages of an open stream as long as its caller is admitted."""
        for message in messages:
            self._admitted(context)
            yield message
