"""A stream stores no more than its limits, even if the peer floods it or does not read."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from frame_bytes import encode

from collapipe.errors import LinkError, WireError
from collapipe.wire.frames import Frame, FrameKind, decode
from collapipe.wire.pieces import PIECE_BYTES
from collapipe.wire.streams import CREDITED, WINDOW, FrameStream

SMALL = Frame(FrameKind.READY, 1, 2, 3)
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
    monkeypatch.setattr("collapipe.wire.streams.time.monotonic", lambda: now[0])
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
    stream.send(SMALL)
    thread.join(120)
    assert not thread.is_alive()
    assert stream.backlog() == (0, 0)
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

    thread = fed(stream, polite())
    for _ in range(50):
        assert stream.receive(5).kind == FrameKind.ACTIVATION
        taken.release()
    thread.join(5)
    assert stream.backlog() == (50 // CREDITED, 0)


def test_a_credit_names_the_last_tensor_that_was_received() -> None:
    stream = FrameStream("peer", 10**6)
    sent = [replace(ACTIVATION, micro_batch=number, epoch=7) for number in range(WINDOW)]
    fed(stream, [piece for frame in sent for piece in pieces(frame)])
    for _ in sent:
        stream.receive(5)
    messages = stream.outgoing()
    credits = [decode(next(messages)[1:]) for _ in range(WINDOW // CREDITED)]
    assert credits == [replace(each, kind=FrameKind.CREDIT, tensors=()) for each in sent[1::2]]


def test_a_flood_of_credits_allows_no_more_frames_than_the_window() -> None:
    stream, sent = FrameStream("flooder", 10**6), list[bytes]()
    fed(stream, Flood(Frame(FrameKind.CREDIT, 0, 0, WINDOW), 20_000)).join(20)
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
        [b"\0" * (PIECE_BYTES + 2)],
        [b"\1nothing"],
        [b"\0" * 1000] * 1000,
        [b"\0"] * 10**5 + [b"\1"],
    ],
    ids=["empty", "kind", "long", "no frame", "endless", "empty pieces"],
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
    wait, sent = stream._to_send.wait, list[bytes]()

    def counted(timeout: float | None = None) -> bool:
        waits.release()
        return wait(timeout)

    stream._to_send.wait = counted  # type: ignore[method-assign]
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
