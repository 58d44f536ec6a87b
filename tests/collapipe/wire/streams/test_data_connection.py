"""A device stream's frames are the same over a data connection and over gRPC."""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest.mock import Mock

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from collapipe.errors import LinkError, WireError
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind, decode
from collapipe.wire.streams import data_connection, data_port, lanes
from collapipe.wire.streams.channels import DAEMON_OPTIONS, Channels, Dialer, serve_stream
from collapipe.wire.streams.data_connection import DataConnection
from collapipe.wire.streams.data_port import DataPort, DataRoute, Offer, connected
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.lanes import ON_CONNECTION, Lane
from collapipe.wire.streams.pieces import PIECE_BYTES, Cutter, Joiner

OWN, OTHER = bytes(32), bytes([1]) * 32
SECONDS = 60.0
FREE = 2**16  # a port above it does not exist


def sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname(), SECONDS)
        other, _ = listening.accept()
    other.settimeout(SECONDS)
    return one, other


def pair(by_aes: bool = False) -> tuple[DataConnection, DataConnection]:
    """Return both ends of a data connection."""
    one, other = sockets()
    return DataConnection(one, OWN, OTHER, by_aes), DataConnection(other, OTHER, OWN, by_aes)


def sealed(message: bytes, key: bytes = OWN) -> bytes:
    """Return the bytes that ``send`` writes for a first message."""
    writing, reading = sockets()
    with writing, reading:
        DataConnection(writing, key, OTHER, by_aes=False).send(message)
        return reading.recv(1000)


def answers_to(data: bytes) -> DataConnection:
    """Return an end whose peer has sent these bytes and ended the connection."""
    one, other = sockets()
    other.sendall(data)
    other.close()
    return DataConnection(one, OTHER, OWN, by_aes=False)


@pytest.mark.parametrize("by_aes", [True, False])
def test_messages_arrive_in_order_and_unreadable_on_the_way(by_aes: bool) -> None:
    one, other = pair(by_aes)
    sent = [b"", b"abc", bytes(500_000)]
    thread = threading.Thread(target=lambda: [one.send(each) for each in sent], daemon=True)
    thread.start()
    assert [other.receive() for _ in sent] == sent
    other.send(b"back")
    assert one.receive() == b"back"
    assert b"secret" not in sealed(b"secret")
    one.close()
    assert other.receive() is None


@pytest.mark.skipif(sys.platform == "darwin", reason="its sends wait")
def test_a_message_is_sent_now_as_far_as_the_peer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ``send``, or a sign of life, sends the rest first."""
    monkeypatch.setattr(data_connection, "_PULSE_S", 0.01)
    one, other = pair()
    one.greet()
    sent = [bytes([number]) * PIECE_BYTES for number in range(100)]
    count = next(number for number, each in enumerate(sent) if not one.send_now(each))
    time.sleep(0.1)
    rest = [b"the next", b"and the last"]
    thread = threading.Thread(target=lambda: [one.send(each) for each in rest], daemon=True)
    thread.start()
    received = list[bytes]()
    while rest[-1] not in received:
        received += [bytes(message)] if (message := other.receive()) else []
    assert received == [*sent[: count + 1], *rest]
    one.close()
    assert not one.send_now(b"more")
    with pytest.raises(OSError, match="descriptor"):
        one.send(b"")


def test_a_message_that_cannot_be_encrypted_is_not_sent_with_the_next() -> None:
    one, other = pair()
    own, failing = one._own, Mock(encrypt_into=Mock(side_effect=MemoryError))
    for each in b"abc", b"def":
        one._own = own
        one.send(each)
        one._own = failing
        with pytest.raises(MemoryError):
            one.send(b"lost")
    one.close()
    assert [other.receive() for _ in range(3)] == [b"abc", b"def", None]


def test_a_received_tensor_is_the_received_bytes() -> None:
    """It is not copied, because it is aligned."""
    one, other = pair()
    frame = Frame(FrameKind.ACTIVATION, 0, 0, 0, (torch.randn(3, 5, 7), torch.ones(3, 5) > 0))
    (piece,) = Cutter().pieces(frame)
    one.send(piece)
    message = other.receive()
    assert message is not None
    data = Joiner().joined(message, 2**20)
    assert data is not None
    received = decode(data).tensors[0]
    assert torch.equal(received, frame.tensors[0])
    message[1:] = bytes(len(message) - 1)
    assert not received.any()


@pytest.mark.parametrize(
    "sent",
    [
        bytes([*sealed(b"abc")[:-1], sealed(b"abc")[-1] ^ 1]),  # changed
        sealed(b"abc", OTHER),  # of the other direction
        bytes(4),  # shorter than any message
        (2**31).to_bytes(4),  # longer than any message
        (3).to_bytes(4) + b"abc",  # shorter than any message
    ],
)
def test_other_bytes_end_the_connection(sent: bytes) -> None:
    with pytest.raises(WireError):
        answers_to(sent).receive()


def test_a_repeated_message_ends_the_connection() -> None:
    end = answers_to(2 * sealed(b"abc"))
    assert end.receive() == b"abc"
    with pytest.raises(WireError):
        end.receive()


def test_a_message_cut_off_is_the_end() -> None:
    assert answers_to(sealed(b"abc")[:-1]).receive() is None
    assert answers_to(b"\0\0").receive() is None


def test_an_offer_travels_as_bytes_and_is_not_shown() -> None:
    offer = Offer(7700, True, b"t" * 16, b"c" * 32, b"d" * 32)
    for each in offer, replace(offer, aes=False):
        assert Offer.unpacked(each.packed()) == each
    assert "ccc" not in repr(offer) and "ttt" not in repr(offer)
    for wrong in b"", offer.packed()[:-1], offer.packed() + b"x":
        with pytest.raises(WireError):
            Offer.unpacked(wrong)


@contextmanager
def listening() -> Iterator[DataPort]:
    port = DataPort("127.0.0.1", FREE)
    try:
        yield port
    finally:
        port.close()


def test_a_ticket_is_valid_once_and_until_its_stream_ends() -> None:
    with listening() as port:
        with port.offered() as (offer, made):
            connection = connected("127.0.0.1", offer)
            made.result(SECONDS).send(b"abc")
            assert connection.receive() == b"abc"
            with pytest.raises(ConnectionError):
                connected("127.0.0.1", offer)
        assert connection.receive() is None  # it ended with its stream
        with port.offered() as (offer, made):
            pass
        with pytest.raises(ConnectionError):
            connected("127.0.0.1", offer)
        assert not port._offers


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("caller", [True, False])
def test_the_ends_use_aes_if_it_is_fast_on_both(
    device: bool, caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as port:
        monkeypatch.setattr(data_port, "has_fast_aes", lambda: device)
        with port.offered() as (offer, made):
            monkeypatch.setattr(data_port, "has_fast_aes", lambda: caller)
            ends = connected("127.0.0.1", offer), made.result(SECONDS)
            kinds = {type(key) for end in ends for key in (end._own, end._other)}
            assert kinds == {AESGCM if device and caller else ChaCha20Poly1305}


def test_strangers_are_few_and_stay_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "CONNECT_S", 1.0)
    with listening() as port, port.offered() as (offer, made):
        address = "127.0.0.1", offer.port
        before = threading.active_count()
        strangers = [socket.create_connection(address, SECONDS) for _ in range(100)]
        strangers[0].sendall(b"x" * 15)
        assert all(each.recv(1) == b"" for each in strangers)  # the port ends them all
        assert threading.active_count() <= before + data_port._MOST_STRANGERS
        assert connected("127.0.0.1", offer) and made.result(SECONDS)


def test_a_port_of_another_program_is_an_error() -> None:
    with (
        answering(lambda caller: caller.sendall(b"220 mail.example ready\r\n")) as offer,
        pytest.raises(ConnectionError, match="bytes"),
    ):
        connected("127.0.0.1", offer)


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[Offer]:
    """Yield an offer of a port where another program answers."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        callers = list[socket.socket]()

        def serve() -> None:
            callers.append(other.accept()[0])
            answer(callers[0])

        threading.Thread(target=serve, daemon=True).start()
        yield Offer(other.getsockname()[1], False, bytes(16), OWN, OTHER)
        for each in callers:
            each.close()


def test_a_greeting_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read may take what is left of the time, whatever the system does."""
    limits, limit = list[float](), data_connection._limit_silence
    monkeypatch.setattr(
        data_connection, "_limit_silence", lambda *how: (limits.append(how[1]), limit(*how))
    )
    monkeypatch.setattr(data_connection, "CONNECT_S", 1.0)

    def drip(caller: socket.socket) -> None:
        with suppress(OSError):
            for each in sealed(b"", OTHER):
                caller.sendall(bytes([each]))
                time.sleep(0.2)

    with answering(drip) as offer, pytest.raises(ConnectionError, match="no sign of life"):
        connected("127.0.0.1", offer)
    left = [each for each in limits if each != data_connection._SILENT_S]
    assert 1 < len(left) < 20 and left == sorted(left, reverse=True) and left[0] <= 1


def test_the_port_is_known_to_a_firewall_unless_another_program_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        wanted = first.getsockname()[1]
    ports = list[DataPort]()
    try:
        for _ in range(2):
            ports.append(DataPort("127.0.0.1", wanted - 10_000))
        assert ports[0]._port == wanted != ports[1]._port
        for each in ports:
            with each.offered() as (offer, made):
                connected("127.0.0.1", offer).close()
                made.result(SECONDS)
    finally:
        for each in ports:
            each.close()


def test_all_addresses_include_those_of_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = DataPort("0.0.0.0", FREE)
    try:
        for host in "127.0.0.1", "::1":
            with port.offered() as (offer, _):
                assert connected(host, offer)
    finally:
        port.close()


@contextmanager
def device(port: DataPort) -> Iterator[tuple[str, list[FrameStream]]]:
    """Serve streams that send each frame back. Yields the address, and the streams."""
    served = list[FrameStream]()

    def echo(stream: FrameStream) -> None:
        try:
            while True:
                stream.send(stream.receive())
        except (LinkError, WireError):
            return

    def handle(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        stream = FrameStream("the caller", 2**24)
        served.append(stream)
        threading.Thread(target=echo, args=(stream,), daemon=True).start()
        yield from serve_stream(stream, messages, context, port)

    server = grpc.server(futures.ThreadPoolExecutor(4), options=DAEMON_OPTIONS)
    methods = {"b": grpc.stream_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", methods),))
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{number}", served
    finally:
        server.stop(0).wait()


def sent_back(stream: FrameStream) -> list[Frame]:
    """Return frames that the peer has sent back, larger ones than a message too."""
    frames = [
        Frame(FrameKind.ACTIVATION, 1, 2, k, (torch.arange(k * 200_000.0),)) for k in range(6)
    ]
    found = []
    for each in frames:
        stream.send(each)
        found.append(stream.receive(SECONDS))
    for ours, theirs in zip(frames, found, strict=True):
        assert torch.equal(ours.tensors[0], theirs.tensors[0])
    return found


@contextmanager
def called(port: DataPort) -> Iterator[tuple[FrameStream, FrameStream, Channels, DeviceAddress]]:
    """Yield both ends of a stream with a data connection, the caller's channels, and the device."""
    with device(port) as (address, served), Channels(Dialer(None)) as channels:
        there = DeviceAddress("pi", address)
        stream = channels.stream(there, "/a/b", 2**24, threading.Event(), has_data=True)
        try:
            yield stream, served[0], channels, there
        finally:
            stream.close()


def test_frames_go_over_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = list[int]()
    seal = DataConnection._seal
    monkeypatch.setattr(
        DataConnection, "_seal", lambda own, data: (carried.append(len(data)), seal(own, data))
    )
    with listening() as port, called(port) as (stream, served, *_):
        sent_back(stream)
        assert sum(carried) >= stream.bytes_out + served.bytes_out > 2 * 4 * 3_000_000


@pytest.mark.parametrize("waits", [False, True])
def test_a_frame_does_not_wait_for_a_peer_that_does_not_read(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a system that ignores the flag of a send. Else two devices could wait for each
    other."""
    if waits:
        monkeypatch.setattr(socket, "MSG_DONTWAIT", 0)
        monkeypatch.setattr(lanes, "_SENDS_WITHOUT_WAITING", False)
    one, other = pair()
    lane, stream = Lane(), FrameStream("peer", 2**24)
    lane.decide(one)
    sending = threading.Thread(target=lambda: [*lane._sent(stream)], daemon=True)
    sending.start()
    frame = Frame(FrameKind.NORMS, 0, 0, 0, (torch.zeros(50_000),))
    caller = threading.Thread(target=lambda: [*map(stream.send, [frame] * 200)], daemon=True)
    caller.start()
    caller.join(SECONDS / 2)
    assert not caller.is_alive()
    stream.close()
    other.close()
    sending.join(SECONDS)
    assert not sending.is_alive()


def test_frames_stay_on_grpc_if_the_port_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "collapipe")
    dialled = list[Offer]()

    def count(host: str, offer: Offer) -> DataConnection:
        dialled.append(offer)
        return connected(host, offer)

    monkeypatch.setattr(data_port, "connected", count)
    with listening() as port:
        port.close()
        with called(port) as (stream, _, channels, there):
            sent_back(stream)
            again = channels.stream(there, "/a/b", 2**24, threading.Event(), has_data=True)
            sent_back(again)
            again.close()
    assert len(dialled) == 1  # not dialled again at once
    assert "stay on gRPC" in caplog.text


def test_after_a_failure_streams_stay_on_grpc_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except if the stream ended meanwhile."""
    route = DataRoute("pi", "127.0.0.1")
    with listening() as port, port.offered() as (first, _), port.offered() as (offer, _):
        closed = replace(offer, port=1)
        assert route.connect(closed, lambda: True) is None
        assert route.connect(first, lambda: False)
        assert route.connect(closed, lambda: False) is None
        assert route.connect(offer, lambda: False) is None
        monkeypatch.setattr(data_port, "_ON_GRPC_S", 0.0)
        route.stay_on_grpc("it broke")
        assert route.connect(offer, lambda: False)


def test_a_network_that_cuts_the_connection_gets_grpc_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[DataConnection]()
    monkeypatch.setattr(
        data_port, "connected", lambda *where: made.append(connected(*where)) or made[-1]
    )
    with listening() as port, called(port) as (stream, _, channels, there):
        sent_back(stream)
        made[0]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LinkError, match="its data connection broke"):
            stream.receive(SECONDS)
        again = channels.stream(there, "/a/b", 2**24, threading.Event(), has_data=True)
        sent_back(again)
        again.close()
    assert len(made) == 1


@pytest.mark.parametrize("pulse_s", [0.05, SECONDS])
def test_a_silent_connection_has_failed(pulse_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle one is not silent, because it has a pulse."""
    monkeypatch.setattr(data_connection, "_PULSE_S", pulse_s)
    monkeypatch.setattr(data_connection, "_SILENT_S", 2.0)
    with listening() as port, called(port) as (stream, served, *_):
        sent_back(stream)
        if pulse_s < 1:
            time.sleep(3)
            sent_back(stream)
        else:
            for end in stream, served:
                with pytest.raises(LinkError):
                    end.receive(SECONDS)


def test_a_connection_may_be_silent_for_longer_than_its_greeting() -> None:
    with listening() as port, port.offered() as (offer, made):
        for end in connected("127.0.0.1", offer), made.result(SECONDS):
            limit = end._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            assert struct.unpack("ll", limit) == (data_connection._SILENT_S, 0)


def test_the_cause_of_an_end_is_that_of_grpc() -> None:
    with listening() as port, called(port) as (stream, _, channels, there):
        sent_back(stream)
        channels.drop(there)
        with pytest.raises(LinkError, match=r"CANCELLED|UNAVAILABLE"):
            stream.receive(SECONDS)


def test_both_ends_end_with_either() -> None:
    for closing in 0, 1:
        with listening() as port, called(port) as (*ends, _, _):
            sent_back(ends[0])
            ends[closing].close()
            with pytest.raises(LinkError):
                ends[1 - closing].receive(SECONDS)


def test_a_stream_closes_although_its_caller_reads_nothing() -> None:
    """Otherwise the thread that sends would wait as long as the caller lives."""
    stream, context = FrameStream("the caller", 2**24), Mock(is_active=lambda: False)
    chosen, over = threading.Event(), threading.Event()

    def messages() -> Iterator[bytes]:
        chosen.wait()
        yield ON_CONNECTION
        over.wait()

    with listening() as port:
        serving = serve_stream(stream, messages(), context, port)
        offer = Offer.unpacked(next(serving)[1:])
        caller = connected("127.0.0.1", offer)
        chosen.set()
        sending = threading.Thread(target=lambda: [*serving], daemon=True)
        sending.start()
        for _ in range(10):  # more than the system's buffers hold
            stream.send(Frame(FrameKind.NORMS, 0, 0, 0, (torch.zeros(10**6),)))
        sent = -1
        while sent < stream.bytes_out:
            sent = stream.bytes_out
            time.sleep(0.3)
        stream.close()
        sending.join(10)
        assert not sending.is_alive()
        caller.close()
        over.set()


def test_the_connection_ends_with_the_channel() -> None:
    """A revoked peer's gRPC call is cancelled; its connection must not outlive the call."""
    with listening() as port, called(port) as (stream, served, channels, there):
        sent_back(stream)
        channels.drop(there)
        for end in stream, served:
            deadline = time.monotonic() + SECONDS
            while not end.over:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.parametrize("first", [b"\6", b"\7", b""])
def test_a_caller_that_names_a_connection_it_has_not_made_is_refused(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "CONNECT_S", 0.1)
    with listening() as port, port.offered() as (_, made):
        lane = Lane()
        with pytest.raises(WireError):
            next(lane.to_device(iter([first]), made))
        lane.close()
        assert lane.connection() is None


def test_a_closed_lane_ends_a_connection_that_comes_late() -> None:
    one, other = pair()
    lane = Lane()
    lane.close()
    lane.decide(one)
    assert other.receive() is None
