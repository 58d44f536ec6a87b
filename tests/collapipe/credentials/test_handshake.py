"""TLS handshakes over loopback: which peers are accepted, and when others are refused."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from made_cluster import Cluster

from collapipe.credentials import verified_channel
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Member, Role, dns_name
from collapipe.credentials.verified_channel import Doorkeeper
from collapipe.errors import LinkError, WireError
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Channels, Dialer
from collapipe.wire.streams.frame_stream import FrameStream

PATIENCE_S = 60.0
AGO = timedelta(hours=-1)
KINDS = ("unary_unary", "stream_stream")
UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED


@dataclass
class Server:
    """A server's address, with the messages and callers that it has accepted."""

    address: str = ""
    messages: list[bytes] = field(default_factory=list)
    callers: list[Member] = field(default_factory=list)


@contextmanager
def serving(credentials: Credentials, *roles: Role) -> Iterator[Server]:
    """Run a server with a unary and a streaming method; both echo messages."""
    server, doorkeeper = Server(), Doorkeeper(credentials, roles or [Role.CONTROL_UNIT])

    def one(message: bytes, context: grpc.ServicerContext) -> bytes:
        server.callers.append(doorkeeper.peer(context.auth_context()))
        server.messages.append(message)
        return message

    def many(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        server.callers.append(doorkeeper.peer(context.auth_context()))
        for message in messages:
            server.messages.append(message)
            yield message

    handlers = {
        "unary_unary": doorkeeper.guard(grpc.unary_unary_rpc_method_handler(one)),
        "stream_stream": doorkeeper.guard(grpc.stream_stream_rpc_method_handler(many)),
    }
    grpc_server = grpc.server(futures.ThreadPoolExecutor(4))
    grpc_server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", handlers),)
    )
    port = grpc_server.add_secure_port("127.0.0.1:0", credentials.server())
    server.address = f"127.0.0.1:{port}"
    grpc_server.start()
    try:
        yield server
    finally:
        grpc_server.stop(None).wait()


def echo(channel: grpc.Channel, kind: str = "unary_unary") -> bytes:
    """Send a message. Returns the reply."""
    sent: Any = iter([b"a", b"b"]) if kind.startswith("stream") else b"ab"
    answer = getattr(channel, kind)(f"/test.Echo/{kind}")(sent, timeout=PATIENCE_S)
    return answer if isinstance(answer, bytes) else b"".join(answer)


def unpinned(
    server: Server, credentials: grpc.ChannelCredentials, name: str = "jetson"
) -> grpc.Channel:
    """A channel that, unlike ``Dialer``'s, does not check the server's certificate first."""
    wanted = ("grpc.ssl_target_name_override", dns_name(name, Role.DEVICE))
    return grpc.secure_channel(server.address, credentials, options=[wanted])


def refusal(channel: grpc.Channel, kind: str = "unary_unary") -> grpc.StatusCode:
    """The status of a call that must fail."""
    with channel, pytest.raises(grpc.RpcError) as error:
        echo(channel, kind)
    print(error.value.details())
    return error.value.code()


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_caller_is_accepted_and_identified(kind: str, cluster: Cluster) -> None:
    unit = cluster.member("boss", Role.CONTROL_UNIT)
    with (
        serving(cluster.member()) as server,
        Dialer(unit).channel("jetson", server.address) as channel,
    ):
        assert echo(channel, kind) == b"ab"
    assert server.callers == [unit.member]
    assert b"".join(server.messages) == b"ab"


def test_a_device_can_dial_a_server_that_accepts_devices(cluster: Cluster) -> None:
    pi = cluster.member("pi")
    with (
        serving(cluster.member(), Role.DEVICE, Role.CONTROL_UNIT) as server,
        Dialer(pi).channel("jetson", server.address) as channel,
    ):
        assert echo(channel) == b"ab"
    assert server.callers == [pi.member]


def test_tls_refuses_callers_without_a_valid_certificate(cluster: Cluster, others: Cluster) -> None:
    jetson = cluster.member()
    stranger = others.member("boss", Role.CONTROL_UNIT)
    late = cluster.member("boss", Role.CONTROL_UNIT, expires_in=AGO)
    early = cluster.member(
        "boss", Role.CONTROL_UNIT, timedelta(days=5), expires_in=timedelta(days=9)
    )
    trusts = jetson.authority
    with serving(jetson) as server:
        assert refusal(unpinned(server, grpc.ssl_channel_credentials(trusts))) == UNAVAILABLE
        for bad in (stranger, late, early):
            credentials = grpc.ssl_channel_credentials(trusts, bad.key, bad.certificate)
            assert refusal(unpinned(server, credentials)) == UNAVAILABLE
        assert refusal(grpc.insecure_channel(server.address)) == UNAVAILABLE
    assert (server.callers, server.messages) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_role_is_refused_before_a_message_is_read(kind: str, cluster: Cluster) -> None:
    pi = cluster.member("pi")
    with (
        serving(cluster.member()) as server,
        Dialer(pi).channel("jetson", server.address) as channel,
    ):
        assert refusal(channel, kind) == UNAUTHENTICATED
    assert (server.callers, server.messages) == ([], [])


def test_a_running_server_refuses_a_newly_revoked_member(cluster: Cluster) -> None:
    unit, other = cluster.member("boss", Role.CONTROL_UNIT), cluster.member("b", Role.CONTROL_UNIT)
    with (
        serving(cluster.member()) as server,
        Dialer(unit).channel("jetson", server.address) as channel,
    ):
        assert echo(channel) == b"ab"
        cluster.revoke(unit.member)
        for kind in KINDS:
            with pytest.raises(grpc.RpcError) as error:
                echo(channel, kind)
            assert error.value.code() == UNAUTHENTICATED
        with Dialer(other).channel("jetson", server.address) as another:
            assert echo(another) == b"ab"
    assert server.callers == [unit.member, other.member]
    assert server.messages == [b"ab", b"ab"]


def test_the_server_can_log_why_the_stream_of_a_revoked_member_ends(cluster: Cluster) -> None:
    own, unit = cluster.member(), cluster.member("boss", Role.CONTROL_UNIT)
    shown = {"x509_pem_cert": [unit.certificate]}
    context = Mock(auth_context=lambda: shown, abort=Mock(side_effect=Exception))
    cluster.revoke(unit.member)
    stream = FrameStream("boss", 2**10)
    stream.feed(Doorkeeper(own, [Role.CONTROL_UNIT])._watched(iter([b"a"]), context))
    with pytest.raises(WireError, match="was revoked"):
        stream.receive(0)


def test_a_renewed_certificate_in_the_folder_does_not_hide_an_expired_one(cluster: Cluster) -> None:
    """The first handshake uses the renewed one in the folder, the channel that of the process."""
    unit = cluster.member("boss", Role.CONTROL_UNIT)
    expired = cluster.member("boss", Role.CONTROL_UNIT, expires_in=AGO)
    running = Dialer(replace(expired, folder=unit.folder))
    with serving(cluster.member()) as server, pytest.raises(LinkError, match="is valid from"):
        running.channel("jetson", server.address)
    with Channels(running) as channels, pytest.raises(WireError, match="is valid from"):
        channels.check(DeviceAddress("jetson", server.address), "/test.Echo/stream_stream")


def test_an_open_stream_ends_at_the_first_message_after_a_revocation(cluster: Cluster) -> None:
    unit = cluster.member("boss", Role.CONTROL_UNIT)
    with (
        serving(cluster.member()) as server,
        Dialer(unit).channel("jetson", server.address) as channel,
    ):

        def sent() -> Iterator[bytes]:
            yield b"a"
            answered.result(PATIENCE_S)
            cluster.revoke(unit.member)
            yield b"b"

        answered: futures.Future[None] = futures.Future()
        call = channel.stream_stream("/test.Echo/stream_stream")(sent(), timeout=PATIENCE_S)
        assert next(call) == b"a"
        answered.set_result(None)
        with pytest.raises(grpc.RpcError) as error:
            next(call)
    assert error.value.code() == UNAUTHENTICATED
    assert server.messages == [b"a"]


def _expired(cluster: Cluster, _: Cluster) -> Credentials:
    return cluster.member(expires_in=AGO)


def _revoked(cluster: Cluster, _: Cluster) -> Credentials:
    thief = cluster.member()
    cluster.revoke(thief.member)
    return thief


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cluster, others: others.member(), "issuer"),
        (_expired, "expired"),
        (_revoked, "revoked"),
        (lambda cluster, others: cluster.member(role=Role.CONTROL_UNIT), "purpose"),
        (lambda cluster, others: cluster.member("pi"), "jetson.*[^.]; another one answers there"),
    ],
    ids=["authority", "expired", "revoked", "role", "name"],
)
def test_a_dialer_refuses_an_invalid_server_certificate(
    make: Callable[[Cluster, Cluster], Credentials], message: str, cluster: Cluster, others: Cluster
) -> None:
    unit = cluster.member("boss", Role.CONTROL_UNIT)
    with serving(make(cluster, others)) as server:
        with pytest.raises(LinkError, match=message) as error:
            Dialer(unit).channel("jetson", server.address)
        assert server.address in str(error.value)
        if message != "revoked":  # gRPC's own TLS does not check revocations
            assert refusal(unpinned(server, unit.channel(unit.authority))) == UNAVAILABLE


def test_the_error_of_a_refused_dialer_names_its_certificate(
    cluster: Cluster, others: Cluster
) -> None:
    late = cluster.member("boss", Role.CONTROL_UNIT, expires_in=AGO)
    with (
        serving(cluster.member()) as server,
        pytest.raises(LinkError, match=r"control-unit boss .* clocks"),
    ):
        Dialer(late).channel("jetson", server.address)


def test_a_channel_accepts_only_the_certificate_that_was_checked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine with the same name may answer after the certificate was checked."""
    unit, first, thief = (
        cluster.member("boss", Role.CONTROL_UNIT),
        cluster.member(),
        cluster.member(),
    )
    monkeypatch.setattr(verified_channel, "_shown", lambda *_: first.certificate)
    with serving(thief) as server:
        assert refusal(Dialer(unit).channel("jetson", server.address)) == UNAVAILABLE
    with serving(first) as server, Dialer(unit).channel("jetson", server.address) as channel:
        assert echo(channel) == b"ab"


def test_a_silent_or_closed_address_is_a_link_error(cluster: Cluster) -> None:
    unit = cluster.member("boss", Role.CONTROL_UNIT)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"jetson at {address}"):
            Dialer(unit, 0.2).channel("jetson", address)
    with pytest.raises(LinkError, match=f"jetson at {address}"):
        Dialer(unit).channel("jetson", address)


def test_the_error_for_an_unknown_host_asks_to_correct_the_address(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(LinkError, match="not known; correct the address"):
        Dialer(cluster.member("boss", Role.CONTROL_UNIT)).channel("jetson", "jetsom:7000")


def test_a_server_that_sends_single_bytes_is_a_link_error(cluster: Cluster) -> None:
    """The time limit must not start again with each byte."""
    unit = cluster.member("boss", Role.CONTROL_UNIT)

    def dribble() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x3e\x80")  # a TLS header that announces 16,000 bytes
            while True:
                connection.sendall(b"\x02")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=dribble, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"jetson at {address}"):
            Dialer(unit, 0.5).channel("jetson", address)
        thread.join(10)
        assert not thread.is_alive()


def test_a_peer_without_a_valid_certificate_is_refused(cluster: Cluster, others: Cluster) -> None:
    """TLS checks a certificate only at first; the certificate may expire during a connection."""
    doorkeeper, unit = Doorkeeper(cluster.member(), [Role.CONTROL_UNIT]), Role.CONTROL_UNIT
    stranger, late = others.member("boss", unit), cluster.member("boss", unit, expires_in=AGO)
    for shown in ([], [b"none"], [stranger.certificate], [late.certificate]):
        with pytest.raises(WireError):
            doorkeeper.peer({"x509_pem_cert": shown})
    good = cluster.member("boss", unit)
    assert doorkeeper.peer({"x509_pem_cert": [good.certificate]}) == good.member
