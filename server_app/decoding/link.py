"""The decoder link's server: streams in, decoder sessions, streams out.

The server listens with mutual TLS: a caller without a unit's key fails in the handshake, before it
can open an HTTP/2 stream. A deployed server has its own certificate; other certificates are made at
start, and again once the clock has changed by 12 hours. A stream is served only with the bearer
token of a session that is open and not in use. A token is valid for one unit and one round.

A unit whose stream broke may open another, and continues after the last finished step. This also
holds after all steps, because the answer to the last one may be lost.
"""

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import grpc
import torch

from collapipe.config import Settings
from collapipe.deployment.server_folder import own_folder
from collapipe.errors import CollaPipeError, ConfigError, LinkError, WireError
from collapipe.own_packages import error_of_plugin, place_in_plugin
from collapipe.process.torch_device import keep_to_threads
from collapipe.sections import LinkSettings
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import METHOD, SERVER_NAME, UNIT_NAME, read_credentials, self_signed
from collapipe.wire.messages import LinkAddress
from collapipe.wire.streams.channels import SERVER_OPTIONS, accept_stream
from collapipe.wire.streams.frame_stream import FrameStream
from server_app.decoding.decoder import DecoderSession
from server_app.refusals import Refusals

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0  # for streams to end when the link closes
_WATCH_S = 1.0
_MADE_AGAIN = timedelta(hours=12)  # certificates are valid from a day before they were made
Metadata = Sequence[tuple[str, str]]


def decoder_link(settings: Settings) -> AbstractContextManager["DecoderLinkServer | None"]:
    """Return the server's end of a run's decoder link; None if units have all heads."""
    if not settings.server_has_heads:
        return nullcontext()
    server = own_folder()
    certified = server.identity() if server else None
    return DecoderLinkServer(settings.link, settings.federation.num_units, certified)


@dataclass
class _Claim:
    """A session, and the one stream that may use it."""

    context: grpc.ServicerContext
    session: DecoderSession
    stream: FrameStream
    left: threading.Event = field(default_factory=threading.Event)
    active: float = field(default_factory=time.monotonic)


@dataclass
class _TokenCheck(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses unknown callers on gRPC's own thread, so that they occupy no worker.

    They get UNIMPLEMENTED, as if the method did not exist. The log has one line for each unit
    number that such callers claim.
    """

    handler: grpc.RpcMethodHandler
    find: Callable[[Metadata], str | None]
    refusals: Refusals = field(default_factory=lambda: Refusals(_log))

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call, or None to refuse it."""
        if call.method == METHOD and self.find(call.invocation_metadata):
            return self.handler
        unit, _ = read_credentials(dict(call.invocation_metadata))
        # All units have the same key: a caller may name another unit.
        caller = f"a stream that names unit {unit}" if unit else "a stream that names no unit"
        self.refusals.note(caller, "no open round has its token")
        return None


class DecoderLinkServer:
    """A gRPC server for as long as the context is open.

    It serves at most ``max_sessions`` sessions at a time, one per scheduled unit. ``certified`` is
    the key and certificate of a deployed server, signed by an authority that units know. If None,
    they are made for this run and sent to the units.
    """

    def __init__(
        self,
        settings: LinkSettings,
        max_sessions: int,
        certified: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._sessions: dict[str, DecoderSession] = {}
        self._claims: dict[str, _Claim] = {}
        self._lock = threading.RLock()  # ``_find`` takes it, too
        self._settings, self._max_sessions = settings, max_sessions
        self._closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True, name="decoder-watch")
        self._certified = certified
        self._threads = futures.ThreadPoolExecutor(
            2 * max_sessions, thread_name_prefix="decoder-link", initializer=keep_to_threads
        )
        self._server = grpc.server(
            self._threads,
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_concurrent_streams", 2 * max_sessions),  # of one connection
            ],
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((_TokenCheck(handler, self._find),))
        self._make_certificates()
        credentials = grpc.dynamic_ssl_server_credentials(
            self._fresh, self._renewed, require_client_authentication=True
        )
        wanted = f"{settings.host}:{settings.port}"
        try:
            port = self._server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"link.host, link.port={wanted}: cannot listen there: another program, perhaps a "
                "run of this server, has the port, or the address is not of this machine; wait for "
                "its end, or set another"
            ) from error
        self._address = settings.dialled(port)

    def __enter__(self) -> "DecoderLinkServer":
        self._server.start()
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._watching.join()
        self._server.stop(_CLOSE_S).wait()
        self._threads.shutdown()

    def open(self, session: DecoderSession) -> LinkAddress:
        """Open a session and return the address for its unit. Raises ``LinkError`` if
        ``max_sessions`` are open."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            if len(self._sessions) >= self._max_sessions:
                raise LinkError(f"{len(self._sessions)} sessions are open, the largest number")
            if abs(datetime.now(UTC) - self._made_at) > _MADE_AGAIN:
                self._make_certificates()
            self._sessions[token] = session
            return LinkAddress(self._address, *self._pinned, *self._unit_identity, token)

    def close(self) -> None:
        """Close all sessions and end their streams; returns when no stream uses its session."""
        with self._lock:
            claims = list(self._claims.values())
            self._sessions.clear()
        for claim in claims:
            claim.context.cancel()
        for claim in claims:
            claim.left.wait()

    def _make_certificates(self) -> None:
        """Make the certificates that units receive with their next sessions."""
        self._made_at = datetime.now(UTC)
        key, certificate = self._certified or self_signed()
        self._pinned = (b"", "") if self._certified else (certificate, SERVER_NAME)
        self._unit_identity = self_signed(UNIT_NAME)
        self._fresh = grpc.ssl_server_certificate_configuration(
            [(key, certificate)], self._unit_identity[1]
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates for this and later handshakes, or None to keep the last ones."""
        with self._lock:
            fresh, self._fresh = self._fresh, None
            return fresh

    def _serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with self._claimed(context) as claim:
                accept_stream(claim.stream, messages, context)
                yield from _obeyed(claim)
        except LinkError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except CollaPipeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:
            no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if no_memory or (place := place_in_plugin(error)) is None:
                raise  # the unit takes it for a broken link and repeats the step
            _log.error("the head raised %s", error_of_plugin(error))
            fault = f"the head raised {type(error).__name__} ({place}); the server's log has more"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)

    @contextmanager
    def _claimed(self, context: grpc.ServicerContext) -> Iterator[_Claim]:
        """Reserve the caller's session. Raises ``LinkError`` if the token is unknown or in use."""
        with self._lock:
            token = self._find(context.invocation_metadata())
            if token is None or token in self._claims:
                raise LinkError("this token's stream was opened already, or its round is over")
            session = self._sessions[token]
            stream = FrameStream("the unit", self._settings.max_message_bytes)
            claim = self._claims[token] = _Claim(context, session, stream)
        try:
            yield claim
        finally:
            session.abandon()
            with self._lock:  # the unit may dial again
                if self._claims.get(token) is claim:
                    del self._claims[token]
            claim.left.set()

    def _find(self, metadata: Metadata) -> str | None:
        """Return the caller's token if it opens a session of the caller's unit, else None."""
        unit, offered = read_credentials(dict(metadata))
        with self._lock:
            for token, session in self._sessions.items():
                same = hmac.compare_digest(token.encode(), offered.encode())
                if same and unit == str(session.unit):
                    return token
        return None

    def _watch(self) -> None:
        """End streams that are silent in the middle of a step. A unit that others wait for leaves
        the round, also if it sends frames: it would take the turn again."""
        limit_s = self._settings.frame_timeout_s
        while not self._closed.wait(_WATCH_S):
            with self._lock:
                claims = dict(self._claims)
            waits_s = max((each.session.waits_s for each in claims.values()), default=0.0)
            for token, claim in claims.items():
                silent = claim.session.in_step and time.monotonic() - claim.active > limit_s
                if min(claim.session.step_s, waits_s) > limit_s or (silent and waits_s):
                    self._exclude(token, claim.session)
                    claim.context.cancel()
                elif silent:
                    claim.context.cancel()

    def _exclude(self, token: str, session: DecoderSession) -> None:
        with self._lock:
            self._sessions.pop(token, None)
        _log.warning(
            "unit %d leaves round %d: other units wait for its step, which took longer than "
            "link.frame_timeout_s=%g; raise it if the unit's devices are slow",
            *(session.unit, session.round, self._settings.frame_timeout_s),
        )


def _obeyed(claim: _Claim) -> Iterator[bytes]:
    """Yield the messages to a unit, and process its frames in between on the same gRPC thread."""
    session, stream = claim.session, claim.stream
    while claim.context.is_active():
        yield from stream.outgoing(until=stream.waiting)
        try:
            frame = stream.receive()
        except LinkError:  # the unit is gone
            return
        works = frame.kind != FrameKind.RESUME  # a unit may repeat RESUME without progress
        claim.active = time.monotonic() if works else claim.active
        if frame.kind == FrameKind.BEGIN and (left := stream.backlog()[1]):
            raise WireError(f"a step begins, but {left} gradients of the last step were not read")
        answer = _answer(session, frame)
        claim.active = time.monotonic() if works else claim.active
        if answer is not None:
            stream.send(answer)


def _answer(session: DecoderSession, frame: Frame) -> Frame | None:
    """Return the session's answer to a frame. Raises ``WireError`` if the frame is invalid."""
    if frame.round != session.round:
        raise WireError(f"frame of round {frame.round} in round {session.round}")
    if frame.kind == FrameKind.BEGIN:
        begin = frame.only(1)[0]
        if begin.shape != (2,) or begin.dtype != torch.int64:
            raise WireError("a step begins with two whole numbers")
        session.begin(frame.step, int(begin[0]), int(begin[1]))
        return None
    if frame.kind == FrameKind.ACTIVATION:
        *sent, mask, targets = frame.only(session.activation_tensors + 2)
        loss, gradient = session.answer(frame.micro_batch, sent, mask, targets)
        tensors = torch.tensor(loss, dtype=torch.float64), *gradient
        return replace(frame, kind=FrameKind.GRADIENT, tensors=tensors)
    if frame.kind == FrameKind.NORMS:
        norms = frame.only(1)[0]
        if norms.dtype != torch.float64 or norms.shape != (session.settings.model.num_blocks + 1,):
            raise WireError(f"norms {norms.dtype} {list(norms.shape)}; a float64 for each part")
        own = torch.tensor([session.finish_step(norms.tolist())], dtype=torch.float64)
        return replace(frame, tensors=(own,))
    if frame.kind == FrameKind.RESUME:
        return replace(frame, tensors=(torch.tensor(session.last_step, dtype=torch.float64),))
    raise WireError(f"a unit does not send {frame.kind.name}")
