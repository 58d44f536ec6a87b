"""The decoder link: valid units train, and invalid streams are refused without harm to others."""

import math
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from decoder_session import decoder_session, decoder_settings, session_with
from frame_bytes import encode
from new_threads import product
from sections import link_settings

from client_app.link import DecoderLink, LinkPrecisions
from collapipe.deployment.server_folder import create
from collapipe.errors import ConfigError, LinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead
from collapipe.models.transformer import TransformerSpec
from collapipe.sections import LinkSettings
from collapipe.tensors import Batch, padded
from collapipe.wire import frames
from collapipe.wire.compression.codec import decode
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.link import (
    METHOD,
    SERVER_NAME,
    UNIT_NAME,
    VALID,
    credentials,
    self_signed,
)
from collapipe.wire.messages import LinkAddress
from collapipe.wire.streams.channels import CHANNEL_OPTIONS, accept_stream
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.outbox import WINDOW
from collapipe.wire.streams.pieces import PIECE_BYTES, credits_of
from server_app.decoding import link as link_server
from server_app.decoding.decoder import DecoderSession
from server_app.decoding.link import DecoderLinkServer

LIMIT, ROWS = 2**20, RowsRead("real")
ONCE = link_settings(max_message_bytes=LIMIT, reconnect_s=0)  # a link that breaks ends the round
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # HTTP/2's empty frame of settings
WEIGHT = "head.embedding.tokens.weight"


def session(unit: int, round_: int = 3) -> DecoderSession:
    return decoder_session(unit, round_, "task.max_length=5")


@pytest.fixture
def server() -> Iterator[DecoderLinkServer]:
    with DecoderLinkServer(link_settings(max_message_bytes=LIMIT), 3) as running:
        yield running


def batch() -> Batch:
    ids = torch.tensor([[5, 6, 2], [7, 2, 0]])
    return Batch(ids, ids != 0, torch.tensor([[5, 2], [6, 2]]))


def train_round(
    address: LinkAddress,
    unit: int,
    round_: int = 3,
    steps: int = 2,
    settings: LinkSettings | None = None,
) -> list[float]:
    """Train a round as an honest unit does; return the losses."""
    losses = []
    with DecoderLink(address, unit, round_, settings or ONCE, ROWS) as link:
        for step in range(round_ * 2 - 2, round_ * 2 - 2 + steps):
            link.begin(DropoutKey(0, unit, step), [batch()], batch().num_targets)
            link.submit(0, torch.ones(2, 3, 8))
            loss, gradient = link.answer(0)
            assert gradient.shape == (2, 3, 8)
            assert gradient[batch().mask].all() and not gradient[~batch().mask].any()
            link.exchange_norms([1.0, 1.0, 1.0])
            losses.append(loss)
    return losses


def dial(address: LinkAddress) -> grpc.Channel:
    """A connection with a unit's key and certificate."""
    keys = address.server_certificate, address.unit_key, address.unit_certificate
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.secure_channel(
        address.address, grpc.ssl_channel_credentials(*keys), options=options
    )


def test_an_honest_unit_trains_its_session(server: DecoderLinkServer) -> None:
    mine = session(0)
    before = mine.part.weights()[WEIGHT].clone()
    first, second = train_round(server.open(mine), 0)
    assert mine.complete
    assert second < first
    assert not torch.equal(before, mine.part.weights()[WEIGHT])


def test_a_session_computes_with_the_threads_of_the_process(
    server: DecoderLinkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model's last bits would depend on whether the stream has a new thread."""
    begin, found = DecoderSession.begin, list[torch.Tensor]()

    def begun(self: DecoderSession, *step: int) -> None:
        found.append(product())
        begin(self, *step)

    monkeypatch.setattr(DecoderSession, "begin", begun)
    train_round(server.open(session(0)), 0)
    assert len(found) == 2
    assert all(torch.equal(each, product()) for each in found)


def test_a_server_leaves_no_threads() -> None:
    """Otherwise a sweep would collect the threads of all its runs."""
    before = {*threading.enumerate()}
    with DecoderLinkServer(link_settings(), 1) as server:
        train_round(server.open(session(0)), 0)
        assert any(each.name.startswith("decoder-link") for each in threading.enumerate())
    left = {*threading.enumerate()} - before
    assert not [each for each in left if each.name.startswith("decoder-")]


@pytest.mark.parametrize(
    ("host", "advertise", "dialled"),
    [
        ("127.0.0.1", None, "127.0.0.1:7"),
        ("0.0.0.0", "edge.example", "edge.example:7"),
        ("0.0.0.0", "edge.example:443", "edge.example:443"),
        ("127.0.0.1", "[2001:db8::1]", "[2001:db8::1]:7"),
        ("127.0.0.1", "2001:db8::5", "[2001:db8::5]:7"),
        ("127.0.0.1", "[2001:db8::5]:443", "[2001:db8::5]:443"),
    ],
)
def test_units_connect_to_the_advertised_address_or_the_servers_own(
    host: str, advertise: str | None, dialled: str
) -> None:
    assert link_settings(host=host, advertise=advertise).dialled(7) == dialled


def test_units_train_over_the_advertised_address() -> None:
    settings = link_settings(host="0.0.0.0", advertise="127.0.0.1")
    with DecoderLinkServer(settings, 1) as server:
        mine = session(0)
        train_round(server.open(mine), 0)
        assert mine.complete


def test_host_0_0_0_0_without_an_advertised_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"link\.advertise"):
        link_settings(host="0.0.0.0")


def test_the_error_for_an_unreachable_server_names_the_option(server: DecoderLinkServer) -> None:
    nowhere = replace(server.open(session(0)), address="127.0.0.1:1")
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1, which is link\.advertise"):
        train_round(nowhere, 0)


@pytest.mark.parametrize(
    "parts", [("token",), ("token", "unit_key", "unit_certificate")], ids=["token", "token and key"]
)
def test_credentials_of_another_run_open_no_stream(
    server: DecoderLinkServer, parts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong token with this run's key is refused and logged once. With another run's key, the
    server does not read the token."""
    mine = session(0)
    address = server.open(mine)
    with DecoderLinkServer(link_settings(max_message_bytes=LIMIT), 1) as another:
        theirs = another.open(session(0))
        stranger = replace(address, **{part: getattr(theirs, part) for part in parts})
        for _ in range(2):
            with pytest.raises(LinkError):
                train_round(stranger, 0)
    refusals = [line for line in caplog.messages if "stream that names unit 0 is refused" in line]
    assert len(refusals) == (len(parts) == 1)
    assert theirs.token not in caplog.text
    train_round(address, 0)
    assert mine.complete


@pytest.mark.parametrize("token", ["", "guessed"])
def test_a_stream_without_the_token_is_refused_and_the_round_continues(
    server: DecoderLinkServer, token: str
) -> None:
    mine = session(0)
    address = server.open(mine)
    stranger = replace(address, token=token)
    with pytest.raises(LinkError, match="refused"):
        train_round(stranger, 0)
    train_round(address, 0)
    assert mine.complete


def test_a_stream_without_metadata_is_refused(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    with dial(address) as channel:
        call = channel.stream_stream(METHOD)(iter([b""]))
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_token_of_another_unit_is_refused_and_both_units_can_train(
    server: DecoderLinkServer,
) -> None:
    sessions = [session(unit) for unit in range(2)]
    addresses = [server.open(each) for each in sessions]
    with pytest.raises(LinkError, match="refused"):
        train_round(addresses[1], unit=0)
    for unit in range(2):
        train_round(addresses[unit], unit)
    assert all(each.complete for each in sessions)


def test_the_token_of_an_old_round_is_refused_and_the_new_round_continues(
    server: DecoderLinkServer,
) -> None:
    old = server.open(session(0, round_=2))
    server.close()
    now = session(0, round_=3)
    address = server.open(now)
    with pytest.raises(LinkError, match="refused"):
        train_round(old, 0, round_=2)
    train_round(address, 0)
    assert now.complete


def test_a_token_opens_one_stream_at_a_time(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    with DecoderLink(address, 0, 3, ONCE, ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [batch()], batch().num_targets)
        link.submit(0, torch.ones(2, 3, 8))
        link.answer(0)
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            train_round(address, 0)


def test_a_unit_trains_a_round_only_once(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    train_round(address, 0)
    for claim in [*server._claims.values()]:
        assert claim.left.wait(60)
    with pytest.raises(LinkError, match="all are done"):
        train_round(address, 0)


def test_a_stream_without_tls_is_refused(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    with grpc.insecure_channel(address.address) as channel:
        call = channel.stream_stream(METHOD)(
            iter([b""]), metadata=credentials(0, address.token), timeout=5
        )
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_closing_a_round_cancels_its_stream(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    with DecoderLink(address, 0, 3, ONCE, ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [batch()], batch().num_targets)
        link.submit(0, torch.ones(2, 3, 8))
        link.answer(0)
        server.close()
        with pytest.raises(LinkError, match="CANCELLED"):
            link.answer(0)


def test_a_closed_round_does_not_process_waiting_activations(server: DecoderLinkServer) -> None:
    mine, started, go_on = session(0), threading.Semaphore(0), threading.Event()
    answer = mine.part.answer

    def slow(*arguments: Any) -> tuple[float, torch.Tensor]:
        started.release()
        assert go_on.wait(60)
        return answer(*arguments)

    mine.part.answer = slow  # type: ignore[method-assign]
    with DecoderLink(server.open(mine), 0, 3, ONCE, ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [batch()] * 2, 2 * batch().num_targets)
        for number in range(2):
            link.submit(number, torch.ones(2, 3, 8))
        assert started.acquire(timeout=60)
        (claim,) = server._claims.values()
        while not claim.stream.waiting():
            time.sleep(0.01)
        closing = threading.Thread(target=server.close)
        closing.start()
        while claim.context.is_active():
            time.sleep(0.01)
        go_on.set()
        closing.join(60)
    assert not closing.is_alive()
    assert not started.acquire(blocking=False)


def test_an_error_of_a_users_head_is_refused_with_its_line_and_not_repeated(
    server: DecoderLinkServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The message may have values of rows; only the server's log has it."""
    mine, calls = session(0), list[int]()

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        raise KeyError("a word of a row")

    mine.part.answer = broken  # type: ignore[method-assign]
    with DecoderLink(server.open(mine), 0, 3, link_settings(reconnect_s=1), ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [batch()], batch().num_targets)
        link.submit(0, torch.ones(2, 3, 8))
        with pytest.raises(
            LinkError, match=r"raised KeyError \(test_link\.py, line \d+\); "
        ) as end:
            link.answer(0)
    assert "a word of a row" not in str(end.value) and "a word of a row" in caplog.text
    assert calls == [1]


def no_memory() -> None:
    raise MemoryError


def own_fault() -> None:
    padded([None], 0)  # type: ignore[list-item]  # fails in CollaPipe itself


@pytest.mark.parametrize("fault", [no_memory, own_fault])
def test_a_step_is_repeated_after_a_fault_that_is_not_the_heads(
    server: DecoderLinkServer, fault: Callable[[], None]
) -> None:
    mine, calls = session(0), list[int]()
    answer = mine.part.answer

    def once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            fault()
        return answer(*arguments)

    mine.part.answer = once  # type: ignore[method-assign]
    train_round(server.open(mine), 0, settings=link_settings(reconnect_s=60))
    assert mine.complete


def test_a_head_whose_loss_is_not_one_number_is_refused(server: DecoderLinkServer) -> None:
    mine = session(0)
    mine.part.module.loss = lambda *arguments: torch.ones(3)  # type: ignore[assignment]
    with pytest.raises(LinkError, match=r"Decoder\.loss returned \[3\], expected the sum"):
        train_round(server.open(mine), 0)


def test_a_unit_that_stops_early_has_not_finished(server: DecoderLinkServer) -> None:
    mine = session(0)
    train_round(server.open(mine), 0, steps=1)
    assert not mine.complete


def good(kind: FrameKind, *tensors: torch.Tensor, step: int = 4, micro_batch: int = 0) -> bytes:
    return piece(encode(Frame(kind, 3, step, micro_batch, tensors)))


def piece(data: bytes) -> bytes:
    """A frame in one piece."""
    return b"\1" + data


HIDDEN, MASK, TARGETS = torch.ones(6, 8), torch.ones(2, 3) > 0, torch.ones(2, 2).long()
BEGIN = good(FrameKind.BEGIN, torch.tensor([1, 4]))
END = good(FrameKind.NORMS, torch.ones(3).double())
MICRO_BATCH = good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"nonsense"], "not a piece of a frame"),
        ([piece(b"nonsense")], "truncated"),
        ([b"\0" * 2**19] * 3, "more than 1,048,576 bytes"),
        ([BEGIN[:-1]], "header says"),
        (
            [piece(encode(Frame(FrameKind.BEGIN, 2, 4, 0, (torch.tensor([1, 4]),))))],
            "of round 2",
        ),
        ([good(FrameKind.BEGIN, torch.tensor([1, 4]), step=9)], "expected 4"),
        ([good(FrameKind.BEGIN, torch.tensor([1.0, 4.0]))], "two whole numbers"),
        ([good(FrameKind.BEGIN, torch.tensor([0, 4]))], "0 micro-batches"),
        ([BEGIN, BEGIN], "another is under way"),
        ([good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS)], "no step has begun"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK)], "expected 3"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN.double(), MASK, TARGETS)], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN[:, :4], MASK, TARGETS)], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK[:1], TARGETS)], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK.byte(), TARGETS)], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS + 19)], "outside of 0 … 19"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS, micro_batch=1)], "expected 0"),
        ([BEGIN, good(FrameKind.NORMS, torch.ones(3).double())], "0 of 1 micro-batches"),
        ([BEGIN, good(FrameKind.NORMS, torch.ones(3))], "a float64 for each part"),
        ([BEGIN, good(FrameKind.NORMS, torch.ones(4).double())], "a float64 for each part"),
        (
            [
                good(FrameKind.BEGIN, torch.tensor([1, 3])),
                MICRO_BATCH,
                END,
            ],
            "4 of 3 target tokens",
        ),
        ([BEGIN, MICRO_BATCH, good(FrameKind.NORMS, -torch.ones(3).double())], "negative"),
        ([BEGIN, MICRO_BATCH, good(FrameKind.NORMS, torch.ones(3).double() / 0)], "infinity"),
        ([BEGIN, MICRO_BATCH, good(FrameKind.NORMS, 1e308 * torch.ones(3).double())], "infinity"),
        ([BEGIN, MICRO_BATCH, good(FrameKind.NORMS, torch.ones(3).double() * torch.nan)], "NaN"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN.repeat(3, 1), MASK, TARGETS)], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS.repeat(1, 3))], "do not fit"),
        ([BEGIN, good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS[:, :0])], "do not fit"),
        ([good(FrameKind.BEGIN, torch.tensor([5, 4]))], "5 micro-batches"),
        ([good(FrameKind.BEGIN, torch.tensor([1, 21]))], "21 target tokens"),
        ([good(FrameKind.GRADIENT)], "does not send GRADIENT"),
    ],
)
def test_an_invalid_stream_ends_with_the_reason_and_changes_no_weight(
    server: DecoderLinkServer, messages: list[bytes], reason: str
) -> None:
    mine = session(0)
    before = {name: tensor.clone() for name, tensor in mine.part.weights().items()}
    address = server.open(mine)
    with dial(address) as channel:
        call = channel.stream_stream(METHOD)(iter(messages), metadata=credentials(0, address.token))
        with pytest.raises(grpc.RpcError) as refused:
            for _ in call:
                pass
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in refused.value.details()
    assert not mine.complete
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.part.weights().items())
    assert all(parameter.grad is None for parameter in mine.part.module.parameters())


NUMBERS = torch.tensor([~0, ~2])


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((HIDDEN, MASK, TARGETS), "expected 4"),
        ((MASK, HIDDEN, MASK, TARGETS), "row numbers"),
        ((NUMBERS.double(), HIDDEN, MASK, TARGETS), "row numbers"),
        ((NUMBERS[:1], HIDDEN, MASK, TARGETS), "row numbers"),
        ((torch.tensor([~0, ~3]), HIDDEN, MASK, TARGETS), "0 … 2"),
        ((torch.tensor([~0, ~0]), HIDDEN, MASK, TARGETS), "0 … 2"),
        ((torch.tensor([~0, 2]), HIDDEN, MASK, TARGETS), "row 2"),
        ((NUMBERS, HIDDEN[:5], MASK, TARGETS), "do not fit"),
        ((NUMBERS, HIDDEN, MASK, TARGETS + 19), "outside of 0 … 19"),
    ],
)
def test_invalid_row_numbers_end_the_stream_and_are_not_stored(
    server: DecoderLinkServer, tensors: tuple[torch.Tensor, ...], reason: str
) -> None:
    mine = decoder_session(0, 3, "task.max_length=5", "compression.feedback=true")
    address = server.open(mine)
    frame = good(FrameKind.ACTIVATION, *tensors)
    with dial(address) as channel:
        call = channel.stream_stream(METHOD)(
            iter([BEGIN, frame]), metadata=credentials(0, address.token)
        )
        with pytest.raises(grpc.RpcError) as refused:
            for _ in call:
                pass
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in refused.value.details()
    assert mine.coder is not None and not mine.coder.arrived.rows


def test_a_message_beyond_the_limit_is_refused(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    with (
        pytest.raises(LinkError, match=r"INVALID_ARGUMENT: .* more than 1,048,576 bytes"),
        DecoderLink(address, 0, 3, replace(ONCE, max_message_bytes=2**30), ROWS) as link,
    ):
        ids = torch.full((1, LIMIT // 16), 5)
        link.begin(DropoutKey(0, 0, 4), [Batch(ids, ids != 0, ids[:, :2])], 2)
        link.submit(0, torch.ones(1, LIMIT // 16, 8))
        link.answer(0)


def test_refused_streams_do_not_use_up_their_connection() -> None:
    """One connection allows two streams a session; the kept errors keep the streams alive."""
    with DecoderLinkServer(ONCE, 1) as server:
        mine, errors = session(0), list[LinkError]()
        address = server.open(mine)
        for _ in range(8):
            with DecoderLink(address, 0, 3, ONCE, ROWS) as link:
                link.begin(DropoutKey(0, 0, 9), [batch()], batch().num_targets)
                with pytest.raises(LinkError, match="INVALID_ARGUMENT: step 9 begins") as refused:
                    link.answer(0)
            errors.append(refused.value)
        train_round(address, 0)
        assert mine.complete


def test_tensors_are_sent_in_pieces_in_both_directions(server: DecoderLinkServer) -> None:
    """The activation has more bytes than one piece, and its values arrive unchanged."""
    mine = decoder_session(0, 3, "task.max_length=4000", "model.dim=64")
    mine.part.answer = lambda hidden, *others: (0.0, 2 * hidden)  # type: ignore[method-assign]
    ids = torch.full((1, 3600), 5)
    hidden = torch.randn(1, 3600, 64)
    assert PIECE_BYTES < hidden.nbytes < LIMIT
    with DecoderLink(server.open(mine), 0, 3, ONCE, ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [Batch(ids, ids != 0, ids[:, :2])], 2)
        link.submit(0, hidden)
        assert torch.equal(link.answer(0)[1], 2 * hidden)


def test_gradients_without_credit_are_kept_for_one_step(
    server: DecoderLinkServer,
) -> None:
    """The unit returns no credit, so the last gradient waits; another step would add more."""
    address = server.open(decoder_session(0, 3, "task.max_length=5", "batch_size=8"))
    outgoing = queue.SimpleQueue[bytes | None]()
    with dial(address) as channel:
        call = channel.stream_stream(METHOD)(
            iter(outgoing.get, None), metadata=credentials(0, address.token), timeout=60
        )
        outgoing.put(good(FrameKind.BEGIN, torch.tensor([WINDOW + 1, 4 * WINDOW + 4])))
        for number in range(WINDOW + 1):
            outgoing.put(good(FrameKind.ACTIVATION, HIDDEN, MASK, TARGETS, micro_batch=number))
            if number < WINDOW:
                assert credits_of(next(call)) == 1
        outgoing.put(END)
        assert frames.decode(next(call)[1:]).kind == FrameKind.NORMS
        outgoing.put(good(FrameKind.BEGIN, torch.tensor([1, 4]), step=5))
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        outgoing.put(None)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "1 gradients" in refused.value.details()


def test_a_unit_that_sends_pieces_without_completing_a_frame_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server_app.decoding.link._WATCH_S", 0.05)
    settings = link_settings(max_message_bytes=LIMIT, frame_timeout_s=0.5)
    with DecoderLinkServer(settings, 1) as server:
        address, over = server.open(session(0)), threading.Event()

        def dribble() -> Iterator[bytes]:
            yield BEGIN
            while not over.wait(0.05):
                yield b"\0"

        with dial(address) as channel:
            call = channel.stream_stream(METHOD)(
                dribble(), metadata=credentials(0, address.token), timeout=60
            )
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            over.set()
    assert ended.value.code() == grpc.StatusCode.CANCELLED


def test_a_unit_that_falls_silent_in_a_step_times_out() -> None:
    """If units share a head, a silent unit would block the others."""
    turn = threading.Lock()
    settings = link_settings(max_message_bytes=LIMIT, frame_timeout_s=4)
    with DecoderLinkServer(settings, 2) as server:
        silent, other = session(0), session(1)
        silent.turn = other.turn = turn
        address = server.open(silent)
        with DecoderLink(address, 0, 3, ONCE, ROWS) as link:
            link.begin(DropoutKey(0, 0, 4), [batch()], batch().num_targets)
            while not silent.in_step:
                time.sleep(0.01)
            train_round(server.open(other), 1)
            with pytest.raises(LinkError, match="CANCELLED"):
                link.answer(0)
        with pytest.raises(LinkError, match="refused"):  # it would block the others again
            train_round(address, 0)
    assert other.complete
    assert not silent.complete


def test_a_slow_unit_that_others_wait_for_leaves_the_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never silent for ``frame_timeout_s``, and its step would take 20 times as long."""
    monkeypatch.setattr("server_app.decoding.link._WATCH_S", 0.05)
    settings = link_settings(max_message_bytes=LIMIT, frame_timeout_s=1)
    slow, other = (
        decoder_session(unit, 3, "task.max_length=5", "batch_size=32") for unit in (0, 1)
    )
    slow.turn = other.turn = threading.Lock()
    ids = torch.tensor([[5, 6, 2]])
    sample = Batch(ids, ids != 0, torch.tensor([[5, 2]]))
    with DecoderLinkServer(settings, 2) as server, ThreadPoolExecutor(1) as pool:
        with DecoderLink(server.open(slow), 0, 3, settings, ROWS) as link:
            link.begin(DropoutKey(0, 0, 4), [sample] * 32, 32 * sample.num_targets)
            while not slow.in_step:
                time.sleep(0.01)
            trains = pool.submit(train_round, server.open(other), 1, settings=settings)
            with pytest.raises(LinkError, match="refused"):
                for number in range(32):
                    link.submit(number, torch.ones(1, 3, 8))
                    link.answer(number)
                    time.sleep(0.7)
        trains.result()
    assert other.complete and slow.last_step[0] == -1
    assert "unit 0 leaves round 3" in caplog.text


def test_a_unit_keeps_its_connection_between_rounds(
    server: DecoderLinkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_channel = [], grpc.secure_channel

    def counted(*arguments: object, **options: object) -> grpc.Channel:
        opened.append(arguments)
        return open_channel(*arguments, **options)

    monkeypatch.setattr(grpc, "secure_channel", counted)
    for _ in range(2):
        one = session(0)
        address = server.open(one)
        train_round(address, 0)
        assert one.complete
        server.close()
    assert len(opened) == 1


@pytest.mark.parametrize("days", [VALID.days / 2, -2])
def test_certificates_are_renewed_before_they_are_invalid(
    server: DecoderLinkServer, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    """A run may last longer than certificates are valid, clocks are set back, and a unit may
    restart at any time."""
    first = server.open(session(0))
    train_round(first, 0)
    server.close()
    assert replace(server.open(session(0)), token=first.token) == first
    server.close()

    class Changed(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days)

    monkeypatch.setattr(link_server, "datetime", Changed)
    mine, other = session(0), session(1)
    address, stale = server.open(mine), server.open(other)
    assert address.server_certificate != first.server_certificate
    train_round(address, 0)
    assert mine.complete
    stale = replace(stale, unit_key=first.unit_key, unit_certificate=first.unit_certificate)
    with pytest.raises(LinkError, match="UNAVAILABLE"):
        train_round(stale, 1)
    server.close()
    again = replace(server.open(session(0)), token=address.token)
    assert again == address  # although the clock is still wrong


def test_strangers_do_not_block_units(server: DecoderLinkServer) -> None:
    """There are more strangers at once than workers of the server."""
    mine = session(0)
    address = server.open(mine)
    never = threading.Event()
    with dial(address) as channel:
        call = channel.stream_stream(METHOD)  # waits until it has a connection
        calls = [call(iter(never.wait, None), wait_for_ready=True) for _ in range(30)]
        train_round(address, 0)
        codes = {call.code() for call in calls}
        never.set()
    assert mine.complete
    # On a busy machine, some calls do not reach the server.
    assert codes <= {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE}
    assert grpc.StatusCode.UNIMPLEMENTED in codes


@pytest.mark.parametrize(
    "answer",
    [
        Frame(FrameKind.GRADIENT, 3, 4, 9, (torch.tensor(1.0), torch.ones(5, 8))),
        Frame(FrameKind.GRADIENT, 3, 4, 0, (torch.ones(3), torch.ones(5, 8))),
        Frame(FrameKind.GRADIENT, 3, 4, 0, (torch.tensor(1.0), torch.ones(6, 8))),
        Frame(FrameKind.GRADIENT, 3, 4, 0, (torch.tensor(1.0), torch.ones(5, 8).double())),
        Frame(FrameKind.GRADIENT, 3, 4, 0, ()),
        Frame(FrameKind.NORMS, 3, 4, 0, ()),
        Frame(FrameKind.GRADIENT, 3, 5, 0, (torch.tensor(1.0), torch.ones(5, 8))),
    ],
)
def test_a_unit_refuses_an_invalid_answer(
    answer: Frame,
) -> None:
    with (
        impostor(answer) as address,
        pytest.raises(WireError),
        DecoderLink(address, 0, 3, ONCE, ROWS) as link,
    ):
        link.begin(DropoutKey(0, 0, 4), [batch()], 4)
        link.submit(0, torch.ones(2, 3, 8))
        link.answer(0)


def test_a_unit_refuses_a_second_answer_to_a_micro_batch() -> None:
    """The unit does not use it for another micro-batch. The last micro-batch is answered, too, so
    that the unit does not wait."""
    once, last = (
        Frame(FrameKind.GRADIENT, 3, 4, number, (torch.tensor(1.0), torch.ones(5, 8)))
        for number in range(2)
    )
    with impostor(once, once, last) as address, DecoderLink(address, 0, 3, ONCE, ROWS) as link:
        link.begin(DropoutKey(0, 0, 4), [batch(), batch()], 8)
        for number in range(2):
            link.submit(number, torch.ones(2, 3, 8))
        link.answer(0)
        with pytest.raises(WireError, match="micro-batch 0"):
            link.answer(1)


@contextmanager
def impostor(*answers: Frame) -> Iterator[LinkAddress]:
    """A server that sends all of these answers after a stream's first activation."""

    def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        stream = FrameStream("the unit", LIMIT)

        def answer() -> None:
            while stream.receive().kind != FrameKind.ACTIVATION:
                continue
            for each in answers:
                stream.send(each)

        threading.Thread(target=answer, daemon=True).start()
        accept_stream(stream, messages, context)
        yield from stream.outgoing()

    key, certificate = self_signed()
    # the link's options: with gRPC's defaults the server would close it because of its pings
    server = grpc.server(ThreadPoolExecutor(2), options=CHANNEL_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(serve)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    try:
        yield LinkAddress(f"127.0.0.1:{port}", certificate, SERVER_NAME, *self_signed(), "token")
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("keys", [None, "its own"])
def test_a_stranger_gets_no_http2_connection(
    server: DecoderLinkServer, keys: str | None, tmp_path: Path
) -> None:
    """A stranger receives no bytes and so cannot open and reset streams."""
    mine = session(0)
    address = server.open(mine)
    context = ssl.create_default_context(cadata=address.server_certificate.decode())
    context.set_alpn_protocols(["h2"])
    if keys:
        (tmp_path / "pem").write_bytes(b"".join(self_signed(UNIT_NAME)))
        context.load_cert_chain(tmp_path / "pem")
    host, port = address.address.rsplit(":", 1)
    received = b""
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        received = secure.recv(2**16)
    assert received == b""
    train_round(address, 0)
    assert mine.complete


def test_a_unit_checks_the_authority_and_the_name_of_a_deployed_server(tmp_path: Path) -> None:
    """The connection fails if the unit expects another authority or another name."""
    made = [create(tmp_path / name, ["a"], "127.0.0.1", 9000, 9001) for name in ("own", "other")]
    with DecoderLinkServer(ONCE, 1, made[0].identity()) as server:
        mine = session(0)
        address = server.open(mine)
        assert (address.server_certificate, address.server_name) == (b"", "")
        own, other = (each.trusted.read_bytes() for each in made)
        for authority, name in ((other, "127.0.0.1"), (own, "127.0.0.2"), (own, SERVER_NAME)):
            lied = replace(address, server_certificate=authority, server_name=name)
            with pytest.raises(LinkError, match="UNAVAILABLE"):
                train_round(lied, 0)
        assert not mine.complete
        train_round(replace(address, server_certificate=own, server_name="127.0.0.1"), 0)
        assert mine.complete


def test_an_address_shows_no_token(server: DecoderLinkServer) -> None:
    address = server.open(session(0))
    for secret in (address.token, "PRIVATE"):
        assert secret not in repr(address)


def test_a_port_in_use_is_reported(server: DecoderLinkServer) -> None:
    port = int(server.open(session(0)).address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: cannot listen"):
        DecoderLinkServer(link_settings(port=port), 1)


@pytest.mark.parametrize(
    ("head", "length", "fits"),
    [
        ("pooled", 1, True),
        ("pooled", 2, False),
        ("tokens", 3, True),
        ("tokens", 4, False),
        ("causal", 3, True),
        ("causal", 4, False),
        ("decoder", 5, True),
        ("decoder", 6, False),
    ],
)
def test_more_targets_than_a_head_can_learn_from_are_refused(
    head: str, length: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit's weight is the number of its target tokens. Each sample has three tokens, and a
    decoder's target at most five."""
    settings = decoder_settings("task.max_length=5")  # the task has a decoder
    monkeypatch.setattr(TransformerSpec, "head", head)
    mine = session_with(settings, 0, 3)
    mine.begin(4, 1, 2 * length if fits else 20)
    targets = torch.ones(2, length, dtype=torch.int64)
    if fits:
        rows = int(RowsRead.by(mine.settings.model).of(MASK, targets).sum())
        mine.answer(0, (HIDDEN[:rows],), MASK, targets)
        assert mine.finish_step([1.0] * 3)
    else:
        with pytest.raises(WireError, match="do not fit"):
            mine.answer(0, (HIDDEN,), MASK, targets)


def test_a_quantised_activation_is_checked_before_it_is_decoded() -> None:
    """A decoded int8 activation is four times as large. Decoding fails here on meta tensors."""
    mine = decoder_session(0, 3, "compression.activation=int8")
    quanta, scales = HIDDEN.to("meta", torch.int8), HIDDEN[..., :1].to("meta")
    with pytest.raises(WireError, match="no step has begun"):
        mine.answer(0, (quanta, scales), MASK, TARGETS)
    mine.begin(4, 1, 4)
    with pytest.raises(WireError, match="came, expected 0"):
        mine.answer(1, (quanta, scales), MASK, TARGETS)
    with pytest.raises(WireError, match="do not fit"):
        mine.answer(0, (quanta.repeat(3, 1, 1), scales), MASK, TARGETS)
    with pytest.raises(RuntimeError, match="meta"):  # it is decoded
        mine.answer(0, (quanta, scales), MASK, TARGETS)


@pytest.mark.parametrize("precision", ["int8", "int6", "int4"])
def test_gradients_are_rounded_randomly_and_reproducibly(precision: str) -> None:
    """The server's random numbers depend on seed, unit, step and micro-batch."""
    exact, (first, again, other) = (
        gradient(0, "float32"),
        (gradient(unit, precision) for unit in (0, 0, 1)),
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, exact)
    quantum = exact.abs().amax(-1, keepdim=True) / (2 ** (int(precision[3:]) - 1) - 1)
    assert bool(((first - exact).abs() <= quantum * (1 + 1e-5)).all())


def gradient(unit: int, precision: str) -> torch.Tensor:
    """The gradient of a session whose head is the same for every unit."""
    torch.manual_seed(5)
    mine = decoder_session(unit, 3, "task.max_length=5", f"compression.gradient={precision}")
    mine.begin(4, 1, 4)
    hidden = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    _, sent = mine.answer(0, (hidden,), MASK, TARGETS)
    return decode(sent, (6, 8), precision, torch.float32)


def test_a_gradient_that_cannot_be_quantised_ends_the_run(server: DecoderLinkServer) -> None:
    """A loss that is not finite does the same. The server records the round and the step."""
    mine = decoder_session(0, 3, "task.max_length=5", "compression.gradient=int4")
    with torch.no_grad():
        for weight in mine.part.module.parameters():
            weight.fill_(math.nan)
    with pytest.raises(LinkError, match="too large for int4"):
        train_round(server.open(mine), 0)
    assert mine.diverged is not None and mine.diverged.startswith("round 3, step 4")


@pytest.mark.parametrize("precision", ["int8", "int6", "int4"])
def test_activations_are_rounded_randomly_and_reproducibly(
    server: DecoderLinkServer, precision: str
) -> None:
    """The unit's random numbers depend on seed, unit, step and micro-batch."""

    def seen(seed: int, micro_batches: Sequence[int]) -> dict[int, torch.Tensor]:
        taken = dict[int, torch.Tensor]()
        mine = decoder_session(0, 3, "task.max_length=5", f"compression.activation={precision}")
        answered = mine.part.answer

        def watched(hidden: torch.Tensor, *others: Any) -> tuple[float, torch.Tensor]:
            taken[len(taken)] = hidden
            return answered(hidden, *others)

        mine.part.answer = watched  # type: ignore[method-assign]
        hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        address = server.open(mine)
        with DecoderLink(address, 0, 3, ONCE, ROWS, LinkPrecisions(precision)) as link:
            link.begin(DropoutKey(seed, 0, 4), [batch()] * len(micro_batches), 8)
            for number in micro_batches:
                link.submit(number, hidden)
                link.answer(number)
        server.close()
        return taken

    first, again, other = seen(0, [0, 1]), seen(0, [0, 1]), seen(1, [0, 1])
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
