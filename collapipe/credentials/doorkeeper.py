"""Check callers of a server for roles and revocations, which TLS does not check."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import grpc

from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Member, Role
from collapipe.errors import WireError


class Doorkeeper:
    """Refuses callers with UNAUTHENTICATED before it reads a message from them.

    TLS refuses a caller without a certificate, or with an expired one or another authority's. In
    Python gRPC cannot check revocations during the handshake. So a revoked member, or one whose
    role is not in ``roles``, completes the handshake, and each of its calls is refused. A stream
    that is already open ends within about a second, or at its next message.
    """

    def __init__(self, credentials: Credentials, roles: Collection[Role]) -> None:
        self._credentials, self._roles = credentials, frozenset(roles)

    def guard(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return a handler that checks the caller first; unary and two-way streams only."""

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
            self._admitted(context)
            return handler.unary_unary(next(messages), context)

        def carry(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
            member = self._admitted(context)
            self._look_after(member, context)
            return handler.stream_stream(self._watched(messages, member, context), context)

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

    def _admitted(self, context: grpc.ServicerContext) -> Member:
        try:
            return self.peer(context.auth_context())
        except WireError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise  # abort does not return

    def _look_after(self, member: Member, context: grpc.ServicerContext) -> None:
        """End a call once its caller is revoked, even if no message is sent."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.5):
                if member.serial in self._credentials.revocations:
                    context.cancel()

        if context.add_callback(ended.set):
            threading.Thread(target=look, daemon=True).start()

    def _watched(
        self, messages: Iterator[bytes], member: Member, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Yield the messages of an open stream until its caller is revoked."""
        for message in messages:
            if member.serial in self._credentials.revocations:
                self._admitted(context)
            yield message
