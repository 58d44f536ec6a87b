"""Who may call a server, beyond what TLS checks: roles and revocations."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc

from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Member, Role
from collapipe.errors import WireError


class Doorkeeper(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses callers with UNAUTHENTICATED before a message of theirs is decoded.

    TLS refuses who has no certificate, another authority's or an expired one. gRPC for Python can
    check no list of revoked certificates there, so that a member that was revoked, or has a role
    that is not among ``roles``, completes the handshake and is refused at each of its calls. Of a
    stream that was open already the next message is refused.

    As an interceptor it stands before every method of a server; ``guard`` puts it before one.
    """

    def __init__(self, credentials: Credentials, roles: Collection[Role]) -> None:
        self._credentials, self._roles = credentials, frozenset(roles)

    def peer(self, auth_context: Mapping[str, Sequence[bytes]]) -> Member:
        """Who calls, by ``ServicerContext.auth_context()``. Raises ``WireError`` for a stranger."""
        shown = auth_context.get("x509_pem_cert", ())
        if len(shown) != 1:
            raise WireError("the caller has shown no certificate; dial with credentials")
        member = self._credentials.check(shown[0])
        if member.role not in self._roles:
            allowed = ", ".join(sorted(self._roles))
            raise WireError(f"{member}: may not call this; allowed: {allowed}")
        return member

    def guard(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """The handler behind this doorkeeper."""
        asked = "stream" if handler.request_streaming else "unary"
        kind = f"{asked}_{'stream' if handler.response_streaming else 'unary'}"
        behaviour, decode = getattr(handler, kind), handler.request_deserializer or bytes

        def guarded(request: Any, context: grpc.ServicerContext) -> object:
            member = self._admitted(context)
            if handler.request_streaming:
                return behaviour(self._watched(request, decode, member, context), context)
            return behaviour(decode(request), context)

        build = getattr(grpc, f"{kind}_rpc_method_handler")
        return build(guarded, None, handler.response_serializer)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The guarded handler of a call; None: there is no such method."""
        handler = continuation(handler_call_details)
        return handler and self.guard(handler)

    def _admitted(self, context: grpc.ServicerContext) -> Member:
        try:
            return self.peer(context.auth_context())
        except WireError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise  # abort does not return

    def _watched(
        self,
        messages: Iterator[bytes],
        decode: Callable[[bytes], object],
        member: Member,
        context: grpc.ServicerContext,
    ) -> Iterator[object]:
        """Messages of an open stream, until its caller is revoked."""
        for message in messages:
            if member.serial in self._credentials.revocations:
                self._admitted(context)
            yield decode(message)
