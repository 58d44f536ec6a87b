"""Which frames a device accepts from its neighbours, and how a relay forwards them."""

import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from frame_bytes import encode
from torch import Tensor

from collapipe.errors import WireError
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.outbox import WINDOW
from pipeline.devices.fence import Fence
from pipeline.devices.hops import HopError, Side, StreamPorts, check_read, relay
from pipeline.hop_codec import HopCodec
from pipeline.schedule import FORWARD, Action

FENCE = Fence(1, 0, 2, [(2, 3), (2, 3)], 4, 2, HopCodec("float32", torch.float32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_marks_tokens_or_numbers_their_sequences(dtype: torch.dtype) -> None:
    sent = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=dtype)
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, *sent)
    hidden, mask = FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer")
    assert mask.dtype == dtype and hidden.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 3), torch.ones(2, 3).long(), torch.ones(6).byte(), torch.ones(2, 4).byte()],
)
def test_a_mask_of_another_type_or_shape_is_refused(mask: torch.Tensor) -> None:
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, torch.zeros(2, 3, 4), mask)
    with pytest.raises(WireError, match="ACTIVATION of"):
        FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer")


@pytest.mark.parametrize(
    ("positions", "length", "fits"),
    [(3, 3, True), (3, 5, True), (3, 6, False), (3, 2, False), (4, 4, False), (2, 3, False)],
)
def test_an_activation_has_the_positions_of_its_micro_batch(
    positions: int, length: int, fits: bool
) -> None:
    """A hostile neighbour's longer one would take the square of its length in time. Blocks may
    append two rows here."""
    tensors = torch.zeros(2, length, 4), torch.ones(2, positions, dtype=torch.bool)
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, *tensors)
    if fits:
        assert FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer") == tensors
        return
    with pytest.raises(WireError, match="ACTIVATION of"):
        FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer")


@pytest.mark.parametrize(("length", "fits"), [(4, True), (5, True), (3, False)])
def test_an_activation_must_have_the_rows_of_the_embedding(length: int, fits: bool) -> None:
    """Ports may be built before the embedding has run. It and the blocks may append a row here."""
    made = dict[int, tuple[Tensor, ...]]()
    mask = torch.ones(2, 3, dtype=torch.bool)
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, torch.zeros(2, length, 4), mask)
    stream = Mock(peer="a peer", receive=Mock(return_value=frame))
    ports = StreamPorts(Side({0: stream}), None, FENCE, lambda ready: None, (2, 2), like=made)
    made[1] = torch.ones(2, 4, 4), mask
    if fits:
        assert ports.receive(Action(FORWARD, 1))[0].shape == (2, length, 4)
        return
    with pytest.raises(HopError, match="unlike the embedding's activation"):
        ports.receive(Action(FORWARD, 1))


def test_the_neighbour_that_has_not_read_the_last_step_is_named() -> None:
    read, unread = FrameStream("read", 2**20), FrameStream("unread", 2**20)
    check_read({"behind-0": read, "behind-1": unread})
    unread.send(FENCE.frame(FrameKind.ACTIVATION, 0, torch.zeros(2, 3, 4)))
    with pytest.raises(HopError, match="has not read") as found:
        check_read({"behind-0": read, "behind-1": unread})
    assert found.value.neighbour == "behind-1"


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.NORMS])
def test_a_relay_reads_no_more_frames_than_the_receiver_allows(kind: FrameKind) -> None:
    """Other frames wait at the sender, which respects its credits."""
    source, sink = FrameStream("sender", 2**20), FrameStream("receiver", 2**20)
    message, taken = b"\1" + encode(Frame(kind, 1, 0, 0, (torch.zeros(2, 3, 4),))), list[int]()

    def messages() -> Iterator[bytes]:
        for number in range(50):
            while source.waiting():
                time.sleep(0.001)
            taken.append(number)
            yield message

    threading.Thread(target=source.feed, args=(messages(),), daemon=True).start()
    relay(source, sink)
    while sum(sink.backlog()) < WINDOW:
        time.sleep(0.001)
    time.sleep(0.1)
    assert sum(sink.backlog()) == WINDOW and len(taken) <= WINDOW + 2
    outgoing = sink.outgoing()
    for _ in range(WINDOW):
        next(outgoing)
    while len(taken) <= WINDOW + 2:
        time.sleep(0.001)
    sink.close()
