"""A stream stores no more than its limits, even if the peer floods it or does not read."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from frame_bytes import encode

from collapipe.errors import LinkError, WireError
from collapipe.wire.frames import Frame, FrameKind, decode
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.outbox import CREDITED, WINDOW
from collapipe.wire.streams.pieces import MOST_CREDITS, PIECE_BYTES, Cutter, Joiner, credits_of

SMALL = Frame(FrameKind.READY, 1, 2, 3)
CREDIT = Frame(FrameKind.CREDIT, 1, 2, 3)
LARGE = Frame(FrameKind.LOAD, 1, 2, 3, (torch.zeros(1000, dtype=torch.uint8),))
ACTIVATION = Frame(FrameKind.ACTIVATION, 1, 2, 3, (torch.zeros(2, 3, 4), torch.ones(2, 3) > 0))


def pieces(frame: Frame) -> Iterator[bytes]:
    """The pieces in which a frame is sent."""
    stream = FrameStream("nobody", 2**40)
    stream.send(frame)
    stream.send(ACTIVATION)
    messages = stream.outgoing()
    for message in messages:
        yield message
        if message[:1] == b"\1":
            return


class Flood:
    """Repeats the same frame and counts how many frames were taken."""

    def __init__(self, frame: Frame, count: int) -> None:
        self.taken, self._messages, self._count = 0, list(pieces(frame)), count

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self._count):
            yield from self._messages
            self.taken += 1


def fed(stream: FrameStream, messages: Iterable[bytes]) -> threading.Thread:
    """Start a thread that feeds messages to the stream."""
    thread = threading.Thread(target=stream.feed, args=(messages,), daemon=True)
    thread.start()
    return thread


def settled(count: Callable[[], int]) -> int:
    """The value of a count when it no longer grows."""
    seen = -1
    while (now := count()) != seen or not now:
        seen = now
        time.sleep(0.2)
    return seen


@pytest.mark.parametrize(("frame", "most"), [(SMALL, 64), (LARGE, 10)], ids=["many", "large"])
def test_a_flood_of_frames_waits_until_frames_are_received(frame: Frame, most: int) -> None:
    flood = Flood(frame, 1000)
    stream = FrameStream("flooder", 10 * len(encode(LARGE)))
    thread = fed(stream, flood)
    assert settled(lambda: flood.taken) == most
    assert thread.is_alive()
    for _ in range(1000):
        assert stream.receive(5).kind == frame.kind
    thread.join(5)
    with pytest.raises(LinkError, match="ended the stream"):
        stream.receive(5)


def test_a_frame_of_the_largest_size_is_taken_when_no_other_frame_waits() -> None:
    stream = FrameStream("peer", len(encode(LARGE)))
    fed(stream, [*pieces(SMALL), *pieces(LARGE)])
    assert [stream.receive(5).kind for _ in range(2)] == [FrameKind.READY, FrameKind.LOAD]


def test_a_peer_whose_frames_wait_for_space_is_not_silent() -> None:
    """The peer's next signs of life arrive only after these frames."""
    stream = FrameStream("peer", len(encode(LARGE)))
    thread = fed(stream, [*pieces(LARGE), *pieces(LARGE)])
    while stream.silent_s:  # it is 0 once the second frame waits
        time.sleep(0.01)
    stream.last_received_s -= 60
    assert stream.silent_s == 0
    stream.receive(5)
    thread.join(5)
    assert 0 < stream.silent_s < 60
    stream.last_received_s -= 60
    assert stream.silent_s > 60


def test_pieces_are_larger_on_a_faster_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small on a slow link, because signs of life wait until a piece is sent."""
    now, bytes_per_s = [0.0], 1e9
    monkeypatch.setattr("collapipe.wire.streams.frame_stream.time.monotonic", lambda: now[0])
    stream, sizes = FrameStream("peer", 2**40), list[int]()
    stream.send(replace(LARGE, tensors=(torch.zeros(2**23, dtype=torch.uint8),)))
    for message in stream.outgoing(until=lambda: True):
        sizes.append(len(message) - 1)
        now[0] += len(message) / bytes_per_s
        if sizes[-1] == PIECE_BYTES:
            bytes_per_s = 1e5
    fast = sizes.index(PIECE_BYTES) + 1
    assert sizes[0] == sizes[-2] == PIECE_BYTES // 8
    assert sizes == sorted(sizes[:fast]) + sorted(sizes[fast:], reverse=True)


def test_a_closed_stream_stores_no_more_messages() -> None:
    flood = Flood(SMALL, 10**4)
    stream = FrameStream("flooder", 10**5)
    thread = fed(stream, flood)
    stream.close()
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    for kind in FrameKind.LOAD, FrameKind.ACTIVATION, FrameKind.PART:
        stream.send(Frame(kind, 1, 2, 3, (tensor,)))
    del tensor
    thread.join(120)
    assert not thread.is_alive()
    assert stream.backlog() == (0, 0) and kept() is None
    assert list(stream.outgoing()) == []


def test_a_peer_that_ignores_the_window_is_refused() -> None:
    stream = FrameStream("flooder", 10**6)
    fed(stream, Flood(ACTIVATION, 100)).join(20)
    for _ in range(WINDOW):
        stream.receive(5)
    with pytest.raises(WireError, match="that wait here"):
        stream.receive(5)


def test_a_peer_that_keeps_to_the_window_is_accepted() -> None:
    """The peer sends one more frame for each frame that was received."""
    stream, taken = FrameStream("peer", 10**6), threading.Semaphore(WINDOW)

    def polite() -> Iterator[bytes]:
        for message in Flood(ACTIVATION, 50):
            taken.acquire()
            yield message

    thread, messages, credits = fed(stream, polite()), stream.outgoing(), 0
    for _ in range(50):
        assert stream.receive(5).kind == FrameKind.ACTIVATION
        while stream.backlog()[0]:
            credits += credits_of(next(messages))
        taken.release()
    thread.join(5)
    assert 50 - WINDOW <= credits <= 50


def test_the_next_frame_brings_credits_and_some_wait_for_none() -> None:
    stream = FrameStream("peer", 10**6)
    sent = [replace(ACTIVATION, micro_batch=number, epoch=7) for number in range(WINDOW)]
    fed(stream, [piece for frame in sent for piece in pieces(frame)])
    messages, brought = stream.outgoing(), list[tuple[FrameKind, int]]()
    stream.receive(5)
    stream.send(SMALL)
    for count in 0, WINDOW - 1, 0:
        for _ in range(count):
            stream.receive(5)
        if not stream.backlog()[0]:
            stream.send(SMALL)
        message = next(messages)
        brought.append((decode(message[1:]).kind, credits_of(message)))
    assert brought == [(SMALL.kind, 1), (FrameKind.CREDIT, CREDITED), (SMALL.kind, 0)]


def test_the_first_piece_of_a_frame_brings_credits() -> None:
    """The last one may take seconds to come."""
    frame = replace(LARGE, tensors=(torch.zeros(2**20, dtype=torch.uint8),))
    assert [*map(credits_of, Cutter().pieces(frame, 3))][:3] == [3, 0, 0]
    stream, (first, *_) = FrameStream("peer", 2**21), Cutter().pieces(frame, 3)
    for _ in range(2 * WINDOW):
        stream.send(ACTIVATION)
    messages = stream.outgoing()
    for _ in range(WINDOW):
        next(messages)
    stream._take_message(first)
    for _ in range(3):
        next(messages)
    assert stream.backlog() == (0, WINDOW - 3)


def test_credits_that_a_piece_cannot_bring_wait_for_the_next() -> None:
    """A peer that ignores the window may be owed more."""
    stream, count = FrameStream("peer", 10**6), MOST_CREDITS + 5
    for message in count * [*pieces(ACTIVATION)]:
        stream._take_message(message)
        stream.receive(0)
    stream.send(SMALL)
    messages = stream.outgoing()
    assert [credits_of(next(messages)) for _ in range(2)] == [MOST_CREDITS, 5]


def test_frames_in_both_directions_need_no_others_for_their_credits() -> None:
    """Also if each end sends only one frame for each that it receives."""
    ends = FrameStream("one", 10**6), FrameStream("other", 10**6)
    messages = [end.outgoing() for end in ends]
    for number in range(10 * WINDOW):
        for here in 0, 1:
            ends[here].send(replace(ACTIVATION, micro_batch=number))
            message = next(messages[here])
            ends[1 - here]._take_message(message)
            assert ends[1 - here].receive(0).micro_batch == number
    assert [end.backlog() for end in ends] == [(0, 0), (0, 0)]


def test_a_flood_of_credits_allows_no_more_frames_than_the_window() -> None:
    stream, sent = FrameStream("flooder", 10**6), list[bytes]()
    fed(stream, 20_000 * [*Cutter().pieces(CREDIT, 15)]).join(20)
    for _ in range(3 * WINDOW):
        stream.send(ACTIVATION)
    messages = stream.outgoing()
    threading.Thread(target=lambda: [sent.append(each) for each in messages], daemon=True).start()
    assert settled(lambda: len(sent)) == WINDOW
    stream.close()


def test_a_thread_that_also_receives_sends_all_frames_that_it_may_send() -> None:
    """Sending ends once a message waits to be received and no more frames may be sent."""
    stream = FrameStream("peer", 10**6)
    for _ in range(WINDOW + 1):
        stream.send(ACTIVATION)
    stream.send(LARGE)
    fed(stream, pieces(SMALL)).join(20)
    assert len(list(stream.outgoing(until=stream.waiting))) == WINDOW + 1
    assert stream.backlog() == (0, 1)
    assert stream.receive(5).kind == SMALL.kind
    with pytest.raises(LinkError):
        stream.receive(5)


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"\4abc"],
        [b"\x14abc"],
        [b"\0" * (PIECE_BYTES + 2)],
        [b"\1nothing"],
        [b"\0" * 1000] * 1000,
        [b"\0"] * 10**5 + [b"\1"],
    ],
    ids=["empty", "kind", "kind with a credit", "long", "no frame", "endless", "empty pieces"],
)
def test_damaged_pieces_end_the_stream(messages: list[bytes]) -> None:
    stream = FrameStream("peer", 10_000)
    fed(stream, messages).join(20)
    with pytest.raises(WireError):
        stream.receive(5)


def test_the_limit_of_a_stream_can_be_raised() -> None:
    """A control unit may send parts after it has announced their size."""
    stream = FrameStream("peer", 100)
    stream.max_bytes = 2000
    fed(stream, pieces(LARGE))
    assert stream.receive(5).kind == FrameKind.LOAD


def test_an_error_while_reading_messages_ends_the_stream() -> None:
    def failing() -> Iterator[bytes]:
        yield from pieces(SMALL)
        raise MemoryError("no more")

    stream = FrameStream("peer", 10**6)
    fed(stream, failing())
    assert stream.receive(5).kind == FrameKind.READY
    with pytest.raises(LinkError, match="no more"):
        stream.receive(5)


def test_receive_raises_empty_after_its_timeout() -> None:
    with pytest.raises(queue.Empty):
        FrameStream("peer", 100).receive(0.01)


def test_an_arriving_frame_does_not_wake_the_sending_thread() -> None:
    stream, waits = FrameStream("the peer", 2**20), threading.Semaphore(0)
    wait, sent = stream._outbox._changed.wait, list[bytes]()

    def counted(timeout: float | None = None) -> bool:
        waits.release()
        return wait(timeout)

    stream._outbox._changed.wait = counted  # type: ignore[method-assign]
    sender = threading.Thread(target=lambda: sent.extend(stream.outgoing()), daemon=True)
    sender.start()
    assert waits.acquire(timeout=60)
    fed(stream, Flood(SMALL, 3)).join(60)
    for _ in range(3):
        stream.receive(60)
    stream.send(SMALL)
    assert waits.acquire(timeout=60)  # woken once, by the frame to send
    stream.close()
    sender.join(60)
    assert len(sent) == 1 and not waits.acquire(blocking=False)


def test_pieces_move_a_stream_but_signs_of_life_do_not() -> None:
    """Otherwise a stream on which devices wait for each other would look busy."""
    sender, receiver = FrameStream("receiver", 2**22), FrameStream("sender", 2**22)
    sender.last_moved_s = receiver.last_moved_s = 0.0
    messages = sender.outgoing()

    def passed(kind: FrameKind, size: int) -> tuple[bool, bool]:
        """Whether the sender and the receiver moved with the first message of a frame."""
        sender.send(Frame(kind, 1, 2, 3, (torch.zeros(size, dtype=torch.uint8),)))
        first = next(messages)
        sender.send(Frame(FrameKind.ALIVE, 1, 2, 3))
        next(messages)  # gRPC has taken the first one
        receiver.feed([first])
        return sender.last_moved_s > 0, receiver.last_moved_s > 0

    assert passed(FrameKind.ALIVE, 8) == (False, False)
    assert passed(FrameKind.PART, 2**20) == (True, True)  # only a piece of the part


class Transport:
    """Runs ``outgoing`` in a thread. ``takes`` says for each message of another thread whether all
    of it is sent at once; all of a later one is."""

    def __init__(self, takes: Sequence[bool]) -> None:
        self.stream, self.takes = FrameStream("peer", 2**30), [*takes]
        self.now, self.later, self.all = list[bytes](), list[bytes](), list[bytes]()
        self.taken = list[Frame]()
        self.stream.on_sent = self.taken.append
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.rest()

    def _run(self) -> None:
        for message in self.stream.outgoing(send_now=self._send_now):
            self.later.append(message)
            self.all.append(message)

    def _send_now(self, message: bytes) -> bool:
        assert threading.current_thread() is not self._thread
        self.now.append(message)
        self.all.append(message)
        return self.takes.pop(0) if self.takes else True

    def rest(self) -> None:
        """Wait until the thread waits."""
        until_s = time.monotonic() + 20
        while not self.stream._outbox._is_idle:
            assert time.monotonic() < until_s
            time.sleep(0.001)

    def end(self) -> None:
        """Wait until nothing is queued, and end the stream."""
        until_s = time.monotonic() + 20
        while (
            not self.stream._outbox._is_idle
            or any(self.stream.backlog())
            or self.stream._outbox._parts
        ):
            assert time.monotonic() < until_s
            time.sleep(0.001)
        self.stream.close()
        self._thread.join(60)


def frames_of(messages: Iterable[bytes]) -> list[Frame]:
    """The frames that these pieces make."""
    joiner = Joiner()
    joined = (joiner.joined(message, 2**30) for message in messages if message)
    return [decode(data) for data in joined if data is not None]


def test_a_small_frame_is_sent_without_a_change_of_threads() -> None:
    transport = Transport([])
    transport.stream.last_moved_s = 0.0
    transport.stream.send(replace(SMALL, kind=FrameKind.ALIVE))
    assert transport.stream.last_moved_s == 0.0
    transport.now.clear()
    transport.stream.bytes_out = 0
    for _ in range(WINDOW):
        transport.stream.send(ACTIVATION)
    transport.stream.send(SMALL)
    assert transport.stream.last_moved_s > 0.0
    assert [each.kind for each in frames_of(transport.now)] == [*[ACTIVATION.kind] * 4, SMALL.kind]
    assert transport.taken == [ACTIVATION] * WINDOW
    assert transport.stream.bytes_out == sum(map(len, transport.now)) - WINDOW - 1
    transport.end()
    assert not transport.later


def test_a_frame_that_waits_for_credit_is_not_overtaken_by_the_next() -> None:
    transport = Transport([])
    sent = [replace(ACTIVATION, micro_batch=number) for number in range(WINDOW + 2)]
    for each in sent:
        transport.stream.send(each)
    assert len(transport.now) == WINDOW
    transport.rest()
    transport.stream.feed(Cutter().pieces(CREDIT, 2))
    transport.end()
    arrived = frames_of(transport.all)
    assert [each.micro_batch for each in arrived] == list(range(WINDOW + 2))


@pytest.mark.parametrize("takes", [[False], [True, False], [True, True, False]])
def test_what_the_transport_cannot_take_now_is_finished_by_its_thread(takes: list[bool]) -> None:
    """The frame has several pieces. The empty message asks the transport for the rest."""
    transport, frame = Transport(takes), replace(ACTIVATION, tensors=(torch.randn(50_000),))
    transport.stream.send(frame)
    transport.stream.send(SMALL)
    transport.end()
    assert len(transport.now) == len(takes) and transport.later[0] == b""
    first, second = frames_of(transport.all)
    assert torch.equal(first.tensors[0], frame.tensors[0]) and second.kind == SMALL.kind
    assert transport.taken == [frame]


def test_a_large_frame_is_sent_by_the_thread() -> None:
    """Its own could compute meanwhile."""
    transport = Transport([])
    transport.stream.send(replace(LARGE, tensors=(torch.zeros(2**20, dtype=torch.uint8),)))
    transport.end()
    assert not transport.now and len(frames_of(transport.later)) == 1


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.LOAD])
def test_a_small_frame_does_not_overtake_a_queued_one(
    kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has not woken yet."""
    transport = Transport([])
    monkeypatch.setattr(transport.stream._outbox._changed, "notify", lambda: None)
    for size in 2**20, 8:
        transport.stream.send(replace(LARGE, kind=kind, tensors=(torch.zeros(size) > 0,)))
    monkeypatch.undo()
    with transport.stream._changed:
        transport.stream._outbox._changed.notify()
    transport.end()
    assert not transport.now
    sizes = [each.tensors[0].numel() for each in frames_of(transport.later) if each.tensors]
    assert sizes == [2**20, 8]


def test_a_frame_is_not_sent_between_the_pieces_of_another() -> None:
    now = list[bytes]()
    stream = FrameStream("peer", 2**30)

    def send_now(message: bytes) -> bool:
        now.append(message)
        stream.send(replace(SMALL, micro_batch=7))  # as another thread might
        return True

    messages = stream.outgoing(send_now=send_now)
    stream.send(replace(LARGE, tensors=(torch.zeros(2**20, dtype=torch.uint8),)))
    next(messages)
    stream.send(SMALL)
    assert not now and stream.backlog() == (1, 0)
    stream._outbox._is_idle = True  # as if the messages so far were sent
    stream._outbox._urgent.clear()
    stream.send(SMALL)
    assert len(now) == 1 and stream.backlog() == (1, 0)


@pytest.mark.parametrize("queued", [SMALL, ACTIVATION, LARGE, replace(LARGE, kind=FrameKind.PART)])
def test_what_is_queued_during_a_send_is_sent_after_it(queued: Frame) -> None:
    transport = Transport([])

    def send_now(message: bytes) -> bool:
        transport.now.append(message)
        transport.stream.send(queued)
        time.sleep(0.1)  # the thread wakes, and has to wait
        assert not transport.later
        return True

    transport.stream._send_now = send_now
    transport.stream.send(SMALL)
    transport.end()
    assert [each.kind for each in frames_of(transport.later)] == [queued.kind]


def test_a_stream_that_closes_during_a_send_ends_after_it() -> None:
    transport = Transport([])

    def send_now(message: bytes) -> bool:
        transport.stream.close()
        time.sleep(0.1)
        return bool(message)

    transport.stream._send_now = send_now
    transport.stream.send(SMALL)
    transport._thread.join(60)
    assert not transport._thread.is_alive()


def test_an_error_between_the_pieces_of_a_frame_closes_the_stream() -> None:
    """Else the peer would take the next frame for the rest of this one."""
    transport = Transport([])

    def send_now(message: bytes) -> bool:
        if transport.now:
            raise MemoryError
        return transport._send_now(message)

    transport.stream._send_now = send_now
    with pytest.raises(MemoryError):
        transport.stream.send(replace(ACTIVATION, tensors=(torch.randn(50_000),)))
    transport.stream.send(SMALL)
    transport._thread.join(60)
    assert not transport._thread.is_alive()
    assert len(transport.all) == 1 and not frames_of(transport.all)


def test_the_thread_finishes_a_frame_without_another_message() -> None:
    transport = Transport([False])
    transport.stream.send(ACTIVATION)
    until_s = time.monotonic() + 20
    while not transport.taken:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    transport.end()
    assert transport.later == [b""] and transport.taken == [ACTIVATION]


def test_frames_of_many_threads_are_sent_whole_and_in_order() -> None:
    transport = Transport([bool(number % 3) for number in range(300)])
    tensor = torch.zeros(100_000, dtype=torch.uint8)  # two pieces
    sent = [
        [
            replace(LARGE, epoch=thread, micro_batch=number, tensors=(tensor,))
            for number in range(50)
        ]
        for thread in range(4)
    ]

    def send(own: Sequence[Frame]) -> None:
        for each in own:
            transport.stream.send(each)
            time.sleep(0.001)  # so that the transport's thread rests in between

    def send_now(message: bytes) -> bool:
        took_all = transport._send_now(message)
        time.sleep(0.001)  # so that others try to send
        return took_all

    transport.stream._send_now = send_now
    threads = [threading.Thread(target=send, args=(own,)) for own in sent]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    transport.end()
    arrived = frames_of(transport.all)
    for thread, own in enumerate(sent):
        numbers = [each.micro_batch for each in arrived if each.epoch == thread]
        assert numbers == [each.micro_batch for each in own]
    assert transport.stream.bytes_out == 200 * len(encode(sent[0][0]))
