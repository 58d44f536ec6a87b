"""Decoding restores frames bit for bit; all other bytes raise ``WireError``."""

import math
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from frame_bytes import encode
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.errors import WireError
from collapipe.wire.frames import (
    MAGIC,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_TENSORS,
    Frame,
    FrameKind,
    decode,
    num_bytes,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
DTYPES += [torch.int8, torch.uint8]
HUGE = 2**32 - 1
numbers = st.integers(0, HUGE)


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """A tensor of random bits, which may be NaN; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(tuple(shape)) if size else torch.empty(*shape, dtype=dtype)


shapes = st.lists(st.integers(0, 3), max_size=4) | st.lists(
    st.integers(0, 2), min_size=MAX_DIMENSIONS, max_size=MAX_DIMENSIONS
)
tensors = st.builds(random_bits, st.sampled_from(DTYPES), shapes, st.integers(0, 2**31))
frames = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    numbers,
    numbers,
    numbers,
    st.lists(tensors, max_size=MAX_TENSORS).map(tuple),
)


def bits(tensor: Tensor) -> bytes:
    """The raw bytes, in which NaNs and signed zeros differ."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def message(
    *shapes: tuple[int, Sequence[int]], kind: int = FrameKind.ACTIVATION, count: int | None = None
) -> bytes:
    """A header built by hand from dtype codes and sizes, without the tensors' bytes."""
    tensors = len(shapes) if count is None else count
    packed = b""
    for code, sizes in shapes:
        packed += struct.pack(f"<BBH{len(sizes)}I", code, len(sizes), 0, *sizes)
    packed += bytes(-(24 + len(packed)) % 64)
    return struct.pack("<4sBBHIIII", MAGIC, kind, tensors, 0, 1, 2, 3, 24 + len(packed)) + packed


SAMPLE = Frame(
    FrameKind.ACTIVATION,
    1,
    2,
    3,
    (
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([True, False, True]),
        torch.tensor(7),
        torch.empty(0, 4),
    ),
)


def beginning_at(start: int, size: int) -> bytes:
    """A frame of this size without tensors, whose header says that they begin at ``start``."""
    head = MAGIC + struct.pack("<BBHIIII", FrameKind.ALIVE, 0, 0, 0, 0, 0, start)
    return head + bytes(size - len(head))


@given(frames)
def test_decoding_restores_every_frame(frame: Frame) -> None:
    """Every kind, dtype and shape is tested, also empty tensors and scalars."""
    data = encode(frame)
    assert len(data) % 8 == 0
    back = decode(data)
    assert (back.kind, back.round, back.step, back.micro_batch) == (
        frame.kind,
        frame.round,
        frame.step,
        frame.micro_batch,
    )
    assert isinstance(back.kind, FrameKind)
    for sent, got in zip(frame.tensors, back.tensors, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.is_contiguous()
        assert bits(got) == bits(sent)


@given(frames)
def test_the_size_is_known_from_dtypes_and_shapes(frame: Frame) -> None:
    """The size is exact and needs no tensors."""
    layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in frame.tensors]
    assert num_bytes(layouts) == len(encode(frame))


def test_the_layout_is_the_documented_one() -> None:
    """The layout is little-endian on any machine; the first tensor is aligned to 64 bytes, the
    others to 8."""
    frame = Frame(FrameKind.NORMS, 1, 2, 3, (torch.tensor([1.5], dtype=torch.float64),))
    body = struct.pack("<d", 1.5)
    assert encode(frame) == message((1, [1]), kind=4) + body
    flags = Frame(FrameKind.BEGIN, 1, 2, 3, (torch.tensor([True, False]), torch.tensor(-2)))
    body = b"\x01\x00" + bytes(6) + struct.pack("<q", -2)
    assert encode(flags) == message((4, [2]), (3, []), kind=1) + body
    quanta = Frame(FrameKind.ACTIVATION, 1, 2, 3, (torch.tensor([-127, 5], dtype=torch.int8),))
    assert encode(quanta) == message((5, [2])) + b"\x81\x05" + bytes(6)


def test_tensors_of_any_layout_are_sent() -> None:
    """Strided views and tensors of a graph are sent; received tensors are writable copies."""
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    sent = (x.T, x[:, ::2] * 1, x[1:, 1:3])
    data = encode(Frame(FrameKind.ACTIVATION, 0, 0, 0, sent))
    received = decode(data).tensors
    for left, right in zip(sent, received, strict=True):
        assert torch.equal(left, right)
        assert not right.requires_grad
    received[0].mul_(2)
    assert encode(decode(data)) == data
    assert torch.equal(decode(data).tensors[0], x.T)


def test_received_tensors_may_be_changed() -> None:
    """Bytes stay as they are; other tensors than floating-point ones are not copied else."""
    data = encode(Frame(FrameKind.PART, 0, 0, 0, (torch.zeros(9, dtype=torch.uint8),)))
    writable = bytearray(data)
    for each in data, writable, memoryview(data):
        decode(each).tensors[0].fill_(1)
    assert data == encode(decode(data)) != bytes(writable)


def test_a_header_with_a_far_first_tensor_takes_no_memory() -> None:
    assert peak_of_refusing(beginning_at(2**20, 2**20 + 24), "begin at byte") < 2**16


def test_a_wrong_truth_value_is_found_without_a_copy() -> None:
    data = bytearray(encode(Frame(FrameKind.PART, 0, 0, 0, (torch.ones(2**20, dtype=torch.bool),))))
    data[-2] = 2
    assert peak_of_refusing(data, "truth value") < 2**16


def peak_of_refusing(data: bytes | bytearray, words: str) -> int:
    """The most bytes that ``decode`` has allocated when it refuses ``data``."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=words):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((torch.zeros(1, dtype=torch.int32),), "torch.int32"),
        ((torch.zeros(1, dtype=torch.float16),), "torch.float16"),
        ((torch.zeros([1] * (MAX_DIMENSIONS + 1)),), "9 dimensions"),
        ((torch.zeros(1),) * (MAX_TENSORS + 1), "at most 8 tensors, got 9"),
    ],
)
def test_tensors_that_a_frame_cannot_carry_are_refused(
    tensors: tuple[Tensor, ...], words: str
) -> None:
    """The sender refuses such tensors."""
    with pytest.raises(WireError, match=words):
        encode(Frame(FrameKind.ACTIVATION, 0, 0, 0, tensors))


def test_truncated_and_extended_frames_are_refused() -> None:
    """Frames are cut at every length, not only at the end of a tensor."""
    data = encode(SAMPLE)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])
    for extra in range(1, 17):
        with pytest.raises(WireError, match=f"{len(data) + extra} bytes; .* says {len(data)}"):
            decode(data + bytes(extra))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated frame: 0 bytes"),
        (b"CPF2" + message()[4:], "not a frame"),
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n", "not a frame"),
        (message(kind=0), "unknown kind of frame: 0"),
        (message(kind=max(FrameKind) + 1), "unknown kind of frame"),
        (message(kind=255), "unknown kind of frame: 255"),
        (message((7, [1])), "unknown dtype 7"),
        (message((255, [])), "unknown dtype 255"),
        (message((0, [1] * (MAX_DIMENSIONS + 1))), r"too many dimensions \(9\)"),
        (message((0, [1] * 255)), "begin at byte 1088$"),
        (message(*[(0, [0])] * (MAX_TENSORS + 1)), "frame of 9 tensors; at most 8"),
        (message(count=255), "frame of 255 tensors; at most 8"),
        (message((0, [1] * MAX_DIMENSIONS), count=3), "end inside its shapes"),
        (message(count=3), "64 bytes; its header says 88"),
        (beginning_at(128, 128), "begin at byte 128 instead of 64"),
        *[(beginning_at(at, 64), f"begin at byte {at}$") for at in (0, 23, 65, 128, 2**32 - 1)],
        (message((4, [1])) + b"\x02" + bytes(7), "truth value"),
        (message((4, [3])) + b"\x01\x00\xff" + bytes(5), "truth value"),
    ],
)
def test_bad_messages_are_named(data: bytes, words: str) -> None:
    """The error states the first fault."""
    with pytest.raises(WireError, match=words):
        decode(data)


@pytest.mark.parametrize(
    "sizes",
    [[HUGE], [HUGE, HUGE], [HUGE] * MAX_DIMENSIONS, [2**20, 2**10], [2**31, 2**31, 4], [2**32 - 8]],
)
@pytest.mark.parametrize("code", range(len(DTYPES)))
@pytest.mark.parametrize("counted_in", [2**32, 2**64])
def test_a_header_with_a_huge_size_takes_no_memory(
    sizes: list[int], code: int, counted_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sizes would fit the message after an overflow of 32 or 64 bits.

    No tensor is created, and less than 64 KiB of memory is allocated.
    """

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a tensor was made before the size was checked")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "frombuffer", refuse)
    wrapped = math.prod(sizes) * DTYPES[code].itemsize % counted_in
    body = bytes(wrapped + -wrapped % 8 if wrapped < 2**10 else 64)
    data = message((code, sizes)) + body
    with pytest.raises(WireError, match=r"its header says|at most .* elements"):
        decode(data)  # a first call, so that Python's caches do not count
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sizes", [[0, HUGE], [HUGE, 0], [3, 0, 2**31], [2**20, 0, 2**20]])
def test_a_tensor_without_elements_may_have_large_sizes(sizes: list[int]) -> None:
    """One size of the tensor is 0, so the tensor takes no memory."""
    tensor = decode(message((0, sizes))).tensors[0]
    assert list(tensor.shape) == sizes
    assert encode(decode(message((0, sizes)))) == message((0, sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        *([HUGE] * place + [0] + [HUGE] * (7 - place) for place in range(MAX_DIMENSIONS)),
        [0, MAX_ELEMENTS // 2**20, 2**20 + 1],
    ],
)
def test_a_tensor_whose_strides_overflow_is_refused(sizes: list[int]) -> None:
    """The tensor has no elements, but torch cannot multiply its sizes."""
    with pytest.raises(WireError, match=r"at most .* elements"):
        decode(message((0, sizes)))


def refused_or_valid(data: bytes) -> None:
    """Decoding raises ``WireError`` or returns a frame of exactly this size."""
    try:
        frame = decode(data)
    except WireError:
        return
    assert len(encode(frame)) == len(data)


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_or_valid(data: bytes, with_magic: bool) -> None:
    """The bytes begin with or without the magic number."""
    refused_or_valid(MAGIC + data if with_magic else data)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 7),
            st.lists(st.sampled_from([0, 1, 2, 3, 255, 2**16, 2**31, HUGE]), max_size=9),
        ),
        max_size=9,
    ),
    st.none() | st.integers(0, 255),
    st.integers(0, 7),
    st.binary(max_size=96),
)
@example([(0, [2, 3])], None, 2, bytes(24))
@example([(4, [8]), (3, [])], None, 2, bytes(16))
def test_random_headers_are_refused_or_valid(
    shapes: list[tuple[int, list[int]]], count: int | None, kind: int, body: bytes
) -> None:
    """The headers are well-formed or nearly so, with any sizes."""
    refused_or_valid(message(*shapes, kind=kind, count=count) + body)


@given(frames, st.data())
def test_damaged_frames_are_refused_or_valid(frame: Frame, data: st.DataObject) -> None:
    """One byte of the header or of a tensor is changed."""
    damaged = bytearray(encode(frame))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    refused_or_valid(bytes(damaged))
