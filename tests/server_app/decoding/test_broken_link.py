"""A broken link is reopened, and the round continues after the last completed step."""

import functools
import gc
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from decoder_session import decoder_session
from sections import link_settings

from client_app.link import DecoderLink, LinkPrecisions
from collapipe.errors import LinkError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.sent_rows import RowsRead
from collapipe.tensors import Batch, Tensors
from collapipe.wire import frames
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.frames import Frame, FrameKind
from server_app.decoding import link as link_server
from server_app.decoding.decoder import DecoderSession
from server_app.decoding.link import DecoderLinkServer

SETTINGS = link_settings(reconnect_s=8)
POINTS = ("begin", "submit", "answer", "norms")


class Wire:
    """A proxy to a port. Its connections can be cut, and new ones can be opened at once."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it is already closed

    def close(self) -> None:
        """Close every connection and accept no new ones."""
        if self._closed:
            return
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in ``accept``
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server has ended
                near.close()
                return
            self._pairs.append((near, far))
            threading.Thread(target=_carry, args=(near, far), daemon=True).start()


def _carry(near: socket.socket, far: socket.socket) -> None:
    other = {near: far, far: near}
    with selectors.DefaultSelector() as ready, near, far:
        for end in other:
            ready.register(end, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                try:
                    data = key.fileobj.recv(65536)
                    other[key.fileobj].sendall(data)
                except OSError:
                    return
                if not data:
                    return


@contextmanager
def wire_to(server: DecoderLinkServer) -> Iterator[Wire]:
    """A proxy to the server."""
    wire = Wire(int(server._address.rpartition(":")[2]))
    try:
        yield wire
    finally:
        wire.close()


def batches() -> list[Batch]:
    """Two micro-batches."""
    ids = torch.tensor([[5, 6, 2], [7, 2, 0]])
    return [Batch(ids, ids != 0, torch.tensor([[5, 2], [6, 2]]), torch.tensor([0, 1]))] * 2


@pytest.mark.parametrize("answered", [True, False])
def test_ready_does_not_wait_on_a_broken_link(answered: bool) -> None:
    """A pipeline sends the next activation only after ``ready`` has returned false."""
    session = decoder_session(0, 3, "task.max_length=5")
    with DecoderLinkServer(SETTINGS, 1) as server, wire_to(server) as wire:
        address = replace(server.open(session), address=wire.address)
        how = LinkPrecisions(session.activation, session.gradient)
        with DecoderLink(address, 0, 3, SETTINGS, RowsRead("real"), how) as link:
            parts, arrived = batches(), threading.Event()
            link.on_answer(arrived)
            link.begin(DropoutKey(0, 0, 4), parts, sum(each.num_targets for each in parts))
            link.submit(0, torch.full((2, 3, 8), 0.5))
            if answered:
                link.answer(0)
            else:
                wait_until(link._stream.waiting, arrived)
            wire.cut()
            wait_until(lambda: link._stream.over, arrived)
            waited = threading.Timer(10, server.close)
            waited.start()
            assert not link.ready(1)
            waited.cancel()
            link.submit(1, torch.full((2, 3, 8), 1.5))
            assert link.answer(1)[0] > 0


def wait_until(condition: Callable[[], bool], arrived: threading.Event) -> None:
    """Block until the condition is true; each event must occur within 10 s."""
    while not condition():
        assert arrived.wait(10)
        arrived.clear()


def precisions(session: DecoderSession) -> LinkPrecisions:
    """The precisions of the session's unit, which has three rows."""
    coder = ChangeCoder(ActivationMemory(), 3, 3) if session.coder else None
    return LinkPrecisions(session.activation, session.gradient, coder)


Outcome = tuple[list[float], tuple[int, int], Tensors, bool]


def trained(cut_at: tuple[int, str] | None, *options: str) -> Outcome:
    """Train a round of two steps and cut the wire once.

    Returns the losses, the bytes up and down, the head's weights, and whether the session is
    complete.
    """
    session = decoder_session(0, 3, "task.max_length=5", *options)
    with DecoderLinkServer(SETTINGS, 1) as server, wire_to(server) as wire:
        address = replace(server.open(session), address=wire.address)
        link = DecoderLink(address, 0, 3, SETTINGS, RowsRead("real"), precisions(session))
        losses = _round(link, wire, cut_at)
    weights = {k: each.clone() for k, each in session.part.weights().items()}
    return losses, (link.bytes_up, link.bytes_down), weights, session.complete


@functools.cache
def unbroken(*options: str) -> Outcome:
    """The round of ``trained`` without a cut."""
    outcome = trained(None, *options)
    torch.manual_seed(0)  # the next session begins with the same head
    return outcome


def _round(link: DecoderLink, wire: Wire, cut_at: tuple[int, str] | None) -> list[float]:
    losses = []

    def at(step: int, point: str) -> None:
        if (step, point) == cut_at:
            time.sleep(0.05)  # sent frames may or may not have arrived by then
            wire.cut()

    with link:
        for step in (4, 5):
            parts = batches()
            link.begin(DropoutKey(0, 0, step), parts, sum(each.num_targets for each in parts))
            at(step, "begin")
            for number in range(2):
                link.submit(number, torch.full((2, 3, 8), 0.5 + number))
            at(step, "submit")
            losses.append(link.answer(0)[0])
            at(step, "answer")
            losses.append(link.answer(1)[0])
            at(step, "norms")
            losses += link.exchange_norms([1.0, 1.0, 1.0])
    return losses


@pytest.fixture(autouse=True)
def same_first_weights() -> None:
    """Every session begins with the same head."""
    torch.manual_seed(0)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_cut_link_does_not_change_the_result(point: str, precision: str) -> None:
    options = f"compression.activation={precision}", f"compression.gradient={precision}"
    losses, sent, weights, complete = unbroken(*options)
    again, sent_again, same, also = trained((5, point), *options)
    assert complete and also
    assert (again, sent_again) == (losses, sent)
    assert all(torch.equal(each, same[name]) for name, each in weights.items())


@pytest.mark.parametrize("feedback", ["false", "true"])
@pytest.mark.parametrize("step", [4, 5])
def test_a_lost_answer_does_not_repeat_the_step(
    step: int, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has done the step and sends its answer again, also after a round's last step."""
    wires, answer = list[Wire](), link_server._answer

    def answer_and_cut(session: DecoderSession, frame: Frame) -> Frame | None:
        own = answer(session, frame)
        if wires and session.last_step[0] == step:
            wires.pop().cut()
        return own

    option = f"compression.feedback={feedback}"
    losses, sent, weights, _ = unbroken(option)
    monkeypatch.setattr(link_server, "_answer", answer_and_cut)
    session = decoder_session(0, 3, "task.max_length=5", option)
    with DecoderLinkServer(SETTINGS, 1) as server, wire_to(server) as wire:
        wires.append(wire)
        address = replace(server.open(session), address=wire.address)
        link = DecoderLink(address, 0, 3, SETTINGS, RowsRead("real"), precisions(session))
        again = _round(link, wire, None)
    assert not wires and session.complete
    assert (again, (link.bytes_up, link.bytes_down)) == (losses, sent)
    assert all(torch.equal(each, session.part.weights()[name]) for name, each in weights.items())


def test_streams_of_earlier_rounds_do_not_block_those_of_the_next_round() -> None:
    """A connection allows two streams a unit, and Python frees reference cycles only at times."""
    settings = link_settings(reconnect_s=0)  # a refused stream fails the test

    def take_part(session: DecoderSession) -> list[float]:
        link = DecoderLink(server.open(session), session.unit, 3, settings, RowsRead("real"))
        return _round(link, wire, None)

    gc.disable()
    try:
        with (
            DecoderLinkServer(settings, 2) as server,
            wire_to(server) as wire,
            ThreadPoolExecutor(2) as units,
        ):
            for _ in range(8):
                sessions = [decoder_session(unit, 3, "task.max_length=5") for unit in range(2)]
                assert len([*units.map(take_part, sessions)]) == 2
                server.close()
    finally:
        gc.enable()


def test_closing_the_server_ends_open_streams_before_it_returns() -> None:
    settings = replace(SETTINGS, reconnect_s=0.0)
    with DecoderLinkServer(settings, 1) as server, wire_to(server) as wire:
        session = decoder_session(0, 3, "task.max_length=5")
        address = replace(server.open(session), address=wire.address)
        with DecoderLink(address, 0, 3, settings, RowsRead("real")) as link:
            link.begin(DropoutKey(0, 0, 4), batches()[:1], batches()[0].num_targets)
            while not session.in_step:
                time.sleep(0.01)
            (claim,) = server._claims.values()
            server.close()
            assert claim.left.is_set() and not server._claims
            with pytest.raises(LinkError, match="decoder link: "):
                link.answer(0)


@contextmanager
def in_step(seconds: float) -> Iterator[tuple[DecoderLink, Wire]]:
    """A link in a step that waits for an activation; ``seconds`` is its limit for reconnecting."""
    settings = replace(SETTINGS, reconnect_s=seconds)
    with DecoderLinkServer(settings, 1) as server, wire_to(server) as wire:
        session: DecoderSession = decoder_session(0, 3, "task.max_length=5")
        address = replace(server.open(session), address=wire.address)
        with DecoderLink(address, 0, 3, settings, RowsRead("real")) as link:
            link.begin(DropoutKey(0, 0, 4), batches()[:1], batches()[0].num_targets)
            while not session.in_step:
                time.sleep(0.01)
            yield link, wire


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_link_that_stays_broken_ends_the_round(seconds: float) -> None:
    with in_step(seconds) as (link, wire):
        wire.close()
        link.submit(0, torch.ones(2, 3, 8))
        with pytest.raises(LinkError, match="decoder link: "):
            link.answer(0)


class Silent:
    """A stream that never receives a frame."""

    def receive(self, seconds: float) -> Frame:
        time.sleep(seconds)
        raise queue.Empty

    def send(self, frame: Frame) -> None:
        assert frame.kind == FrameKind.RESUME

    def close(self) -> None:
        pass


def test_a_link_stops_waiting_for_a_server_that_is_silent_after_a_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_step(0.5) as (link, wire):
        monkeypatch.setattr(DecoderLink, "_opened", lambda _: Silent())
        wire.close()
        link.submit(0, torch.ones(2, 3, 8))
        with pytest.raises(LinkError, match=r"not reconnected within link\.reconnect_s=0\.5"):
            link.answer(0)


def test_a_step_that_breaks_every_stream_ends_the_round_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reopened stream repeats the frame that breaks it."""
    opened = list[float]()

    def encoding(frame: Frame) -> list[memoryview]:
        if frame.kind == FrameKind.ACTIVATION:
            opened.append(time.monotonic())
            raise WireError("no frame carries it")
        return buffers(frame)

    buffers = frames.buffers
    with in_step(1) as (link, _):
        monkeypatch.setattr(frames, "buffers", encoding)
        link.submit(0, torch.ones(2, 3, 8))
        began = time.monotonic()
        with pytest.raises(LinkError, match=r"not reconnected within link\.reconnect_s=1"):
            link.answer(0)
        assert time.monotonic() - began < 10
        assert 2 < len(opened) < 12


def test_a_break_with_activation_feedback_ends_the_round() -> None:
    """The server has already applied the changes of activations, so they cannot be sent again."""
    session = decoder_session(0, 3, "task.max_length=5", "compression.feedback=true")
    with DecoderLinkServer(SETTINGS, 1) as server, wire_to(server) as wire:
        address = replace(server.open(session), address=wire.address)
        how = LinkPrecisions(coder=ChangeCoder(ActivationMemory(), 3, 3))
        with DecoderLink(address, 0, 3, SETTINGS, RowsRead("real"), how) as link:
            link.begin(DropoutKey(0, 0, 4), batches(), 8)
            link.submit(0, torch.ones(2, 3, 8))
            while not session.in_step:
                time.sleep(0.01)
            wire.cut()
            link.submit(1, torch.ones(2, 3, 8))
            with pytest.raises(LinkError, match="decoder link: "):
                link.answer(0)
                link.answer(1)


def test_norms_that_never_arrived_end_a_round_with_activation_feedback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has the step's changes but has not finished the step."""
    wires, answer = list[Wire](), link_server._answer

    def lose_norms(session: DecoderSession, frame: Frame) -> Frame | None:
        if frame.kind == FrameKind.NORMS:
            wires.pop().cut()
            raise RuntimeError("lost")
        return answer(session, frame)

    monkeypatch.setattr(link_server, "_answer", lose_norms)
    session = decoder_session(0, 3, "task.max_length=5", "compression.feedback=true")
    with DecoderLinkServer(SETTINGS, 1) as server, wire_to(server) as wire:
        wires.append(wire)
        address = replace(server.open(session), address=wire.address)
        link = DecoderLink(address, 0, 3, SETTINGS, RowsRead("real"), precisions(session))
        with pytest.raises(LinkError, match="broke before the server finished step 4"):
            _round(link, wire, None)
