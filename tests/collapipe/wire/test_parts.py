"""Frames on a stream: whole, in their order, and parts behind all others."""

import itertools

import pytest
import torch

from collapipe.errors import WireError
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import PIECE_BYTES, FrameStream

MOST = 2**24


def tensors(*sizes: int) -> tuple[torch.Tensor, ...]:
    """Of so many bytes."""
    return tuple(torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes)


def received(messages: list[bytes], max_bytes: int = MOST) -> FrameStream:
    """The other end, once these have come."""
    stream = FrameStream("peer", max_bytes)
    stream.feed(messages)
    return stream


@pytest.mark.parametrize("size", [0, 1, 7, PIECE_BYTES - 40, PIECE_BYTES - 32, 2 * PIECE_BYTES + 9])
def test_a_frame_comes_as_it_was_sent(size: int) -> None:
    """Also where it ends at the end of a piece."""
    sent = Frame(FrameKind.ACTIVATION, 1, 2, 3, tensors(size, 5), 4)
    stream = FrameStream("peer", MOST)
    stream.send(sent)
    count = -(-(48 + size) // PIECE_BYTES)  # header, and padding
    messages = list(itertools.islice(stream.outgoing(), count))
    assert all(len(each) <= PIECE_BYTES + 1 for each in messages)
    found = received(messages).receive(0)
    assert (found.kind, found.round, found.step, found.micro_batch, found.epoch) == (2, 1, 2, 3, 4)
    assert all(map(torch.equal, found.tensors, sent.tensors))


def test_others_overtake_a_part() -> None:
    """A part of 100 MB takes a slow link 8 s; without a sign of life a device is gone after 5."""
    stream = FrameStream("peer", MOST)
    part = Frame(FrameKind.PART, 0, 0, 0, tensors(3 * PIECE_BYTES))
    alive = Frame(FrameKind.ALIVE, 0, 0, 0)
    stream.send(part)
    outgoing = stream.outgoing()
    messages = [next(outgoing)]
    stream.send(alive)
    messages += itertools.islice(outgoing, 4)
    end = received(messages)
    first, second = end.receive(0), end.receive(0)
    assert (first.kind, second.kind) == (FrameKind.ALIVE, FrameKind.PART)
    assert torch.equal(second.tensors[0], part.tensors[0])


def test_parts_keep_their_order() -> None:
    stream = FrameStream("peer", MOST)
    for step in range(3):
        stream.send(Frame(FrameKind.PART, 0, step, 0, tensors(8)))
    end = received(list(itertools.islice(stream.outgoing(), 3)))
    assert [end.receive(0).step for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("messages", [[b""], [b"\x04"], [b"\0" + b"x" * (PIECE_BYTES + 1)]])
def test_what_is_no_piece_ends_the_stream(messages: list[bytes]) -> None:
    with pytest.raises(WireError):
        received(messages).receive(0)


@pytest.mark.parametrize("lane", [0, 2])
def test_a_frame_beyond_the_limit_ends_the_stream(lane: int) -> None:
    with pytest.raises(WireError):
        received([bytes([lane]) + b"x" * 600] * 2, 1000).receive(0)


def test_a_part_that_is_made_later_is_made_when_it_is_its_turn() -> None:
    stream, made = FrameStream("peer", MOST), list[int]()

    def make(step: int) -> Frame:
        made.append(step)
        return Frame(FrameKind.PART, 0, step, 0, tensors(2 * PIECE_BYTES))

    for step in range(2):
        stream.send_later(lambda step=step: make(step))  # type: ignore[misc]
    outgoing = stream.outgoing()
    assert made == [] and not stream.all_made()
    messages = [next(outgoing)]
    assert made == [0] and not stream.all_made()
    messages += itertools.islice(outgoing, 5)
    assert made == [0, 1] and stream.all_made()
    end = received(messages)
    assert [end.receive(0).step for _ in range(2)] == [0, 1]


def test_parts_that_nobody_takes_any_more_are_not_waited_for() -> None:
    stream = FrameStream("peer", MOST)
    stream.send_later(lambda: Frame(FrameKind.PART, 0, 0, 0))
    stream.feed([])
    assert stream.all_made()
