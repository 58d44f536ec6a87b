"""Hops between stages of which one has several devices: order, rows, and who is at fault."""

import queue
import threading
from collections.abc import Sequence

import torch

from collapipe.errors import LinkError, WireError
from collapipe.wire.frames import Frame, FrameKind
from pipeline.devices.hops import Fence, Junction, JunctionStep, Side
from pipeline.devices.messages import BEFORE
from pipeline.hop_codec import HopCodec

FENCE = Fence(1, 0, 3, 4, HopCodec("float32", torch.float32))
WIDTH = 2


class Scripted:
    """A stream that brings the frames of a test, and keeps those that are sent."""

    def __init__(self, peer: str) -> None:
        self.peer, self.sent = peer, queue.SimpleQueue[Frame]()
        self.brings = queue.SimpleQueue[Frame | None]()

    def receive(self) -> Frame:
        frame = self.brings.get()
        if frame is None:
            raise LinkError("closed")
        return frame

    def send(self, frame: Frame) -> None:
        self.sent.put(frame)

    def close(self) -> None:
        self.brings.put(None)


def activation(micro_batch: int, *rows: float) -> Frame:
    """One of these rows."""
    hidden = torch.tensor(rows, dtype=torch.float32)[:, None, None].expand(-1, WIDTH, FENCE.dim)
    mask = torch.ones(len(rows), WIDTH, dtype=torch.bool)
    return FENCE.frame(FrameKind.ACTIVATION, micro_batch, hidden.contiguous(), mask)


class Opened:
    """A junction from two devices, of which the second one has the last row, to one device."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.front, self.back = [Scripted("a"), Scripted("b")], [Scripted("c")]
        self.faults, self.noted = list[tuple[str, int]](), threading.Event()
        activations = {i: activation(i, *range(rows)).tensors for i, rows in enumerate(sizes)}
        step = JunctionStep(sizes, FENCE, activations)
        split = Side(self.front, lambda rows: [(0, rows - 1), (rows - 1, rows)])  # type: ignore[arg-type]
        Junction(split, Side(self.back), {FENCE.step: step}, self._note)  # type: ignore[arg-type]

    def _note(self, side: str, place: int, error: WireError) -> None:
        self.faults.append((side, place))
        self.noted.set()

    def came(self) -> Frame:
        """The next frame behind the junction."""
        return self.back[0].sent.get(timeout=5)


def test_a_later_micro_batch_waits_for_an_earlier_one() -> None:
    """Though all its rows are there; rows are put together in the devices' order."""
    opened = Opened([2, 1])
    opened.front[1].brings.put(activation(0, 1.0))
    opened.front[1].brings.put(activation(1, 5.0))
    assert opened.back[0].sent.empty()
    opened.front[0].brings.put(activation(0, 0.0))
    first, second = opened.came(), opened.came()
    assert [each.micro_batch for each in (first, second)] == [0, 1]
    assert first.tensors[0][:, 0, 0].tolist() == [0.0, 1.0]
    assert second.tensors[0][:, 0, 0].tolist() == [5.0]
    for each in opened.front:
        each.close()


def test_who_sends_an_invalid_frame_is_named() -> None:
    """Not who sends the next one: rows that it has not, another step, another form, or twice."""
    narrow = activation(0, 0.0)
    for frames in (
        [FENCE.frame(FrameKind.ACTIVATION, 1)],  # of no rows
        [activation(0, 0.0, 1.0)],
        [narrow, activation(0, 0.0)],
        [FENCE.frame(FrameKind.NORMS)],
        [FENCE.frame(FrameKind.ACTIVATION, 0, torch.ones(1, 1, 4), torch.ones(1, 1).bool())],
        [Frame(FrameKind.ACTIVATION, 7, FENCE.step, 0, narrow.tensors, 0)],
    ):
        opened = Opened([2, 1])
        for frame in frames:
            opened.front[0].brings.put(frame)
        assert opened.noted.wait(5)
        assert opened.faults == [(BEFORE, 0)]
