"""A peer that violates a daemon's protocol: it sends raw messages and mutated frames."""

import json
import math
import queue
import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

from collapipe.errors import LinkError, WireError
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import CHANNEL_OPTIONS
from collapipe.wire.streams.frame_stream import ACCEPTED, FrameStream
from collapipe.wire.streams.lanes import ON_GRPC
from pipeline.devices.encoding import as_bytes, as_tensor
from pipeline.devices.messages import CONTROL, HOP, NEIGHBOUR, SESSION, secret_for
from tests.device_cluster import Work, daemons, device_name, plan_of
from tests.frame_bytes import encode

PATIENCE_S = 60.0  # a daemon that takes longer counts as hung, also on a busy machine
Metadata = Sequence[tuple[str, str]]


class RawStream:
    """A stream to one of a daemon's methods that can send any bytes."""

    def __init__(self, channel: grpc.Channel, method: str, metadata: Metadata = ()) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._incoming = FrameStream("the daemon", 2**30)
        call = channel.stream_stream(method)(
            iter(self._outgoing.get, None), metadata=tuple(metadata), timeout=PATIENCE_S
        )
        self._call = call
        call.initial_metadata()
        if not call.is_active():
            raise LinkError(f"{call.code().name}: {call.details()}")
        answers = map(_without_offer, call)
        threading.Thread(target=self._incoming.feed, args=(answers,), daemon=True).start()
        if method == HOP:
            self.send(ON_GRPC)

    def send(self, message: bytes) -> None:
        """Send a gRPC message with any content."""
        self._outgoing.put(message)

    def send_frame(self, frame: Frame) -> None:
        """Send a whole frame in one message."""
        self.send(as_message(frame.kind, encode(frame)))

    def receive(self) -> Frame:
        """Return the daemon's next frame; raises ``LinkError`` or ``WireError`` if it has ended the
        stream."""
        return self._incoming.receive(PATIENCE_S)

    def close(self) -> None:
        """Disconnect."""
        self._outgoing.put(None)
        self._call.cancel()
        self._incoming.close()


def _without_offer(message: bytes) -> bytes:
    """Return the message, or only the acceptance if it offers a data connection."""
    return ACCEPTED if message.startswith(ACCEPTED) else message


def as_message(kind: int, data: bytes) -> bytes:
    """Return a frame's bytes as one message, on the lane of its kind."""
    return bytes([3 if kind == FrameKind.PART else 1]) + data


@dataclass
class HostileUnit:
    """A control unit that reopens its streams after the daemon has ended them."""

    address: str
    _control: RawStream | None = None
    _clock_requests: int = 0
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)

    def __enter__(self) -> "HostileUnit":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.channel.close()

    @property
    def control(self) -> RawStream:
        """The control stream, opened once the daemon is free."""
        deadline = time.monotonic() + PATIENCE_S
        while self._control is None:
            try:
                self._control = RawStream(self.channel, CONTROL)
            except LinkError as error:
                assert "RESOURCE_EXHAUSTED" in str(error), error
                assert time.monotonic() < deadline, "the daemon remains busy"
                time.sleep(0.005)
        return self._control

    def leave(self) -> None:
        """End the control stream."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def settled(self) -> bool:
        """Wait until the daemon has processed all messages; return False if it ended the stream."""
        self._clock_requests += 1
        self.control.send_frame(Frame(FrameKind.CLOCK, 0, self._clock_requests, 0))
        try:
            while not self._answers(self.control.receive()):
                pass
        except (LinkError, WireError):
            self.leave()
            return False
        return True

    def hop(self, session: str, neighbour: str) -> RawStream:
        """Open a hop stream under this neighbour's name."""
        metadata = (SESSION, secret_for(session, neighbour)), (NEIGHBOUR, neighbour)
        return RawStream(self.channel, HOP, metadata)

    def load(self, frames: Sequence[Frame]) -> bool:
        """Load a segment by LOAD and its PARTs; return False if the daemon ended the stream."""
        for frame in frames:
            self.control.send_frame(frame)
            if not self.settled():
                return False
        return True

    def _answers(self, frame: Frame) -> bool:
        if frame.kind == FrameKind.FAILED:
            self.troubles.append(json.loads(as_bytes(frame.tensors[0]))["message"])
        return frame.kind == FrameKind.CLOCK and frame.step == self._clock_requests


def recorded(devices: int = 1) -> list[Frame]:
    """Return all frames of a round, except ALIVE, in the order of sending."""
    frames, send, send_later = list[Frame](), FrameStream.send, FrameStream.send_later

    def noted(frame: Frame) -> Frame:
        if frame.kind != FrameKind.ALIVE:
            own = tuple(each.detach().clone() for each in frame.tensors)
            frames.append(replace(frame, tensors=own))
        return frame

    def noting(stream: FrameStream, frame: Frame) -> None:
        send(stream, noted(frame))

    def noting_later(stream: FrameStream, make: Callable[[], Frame]) -> None:
        send_later(stream, lambda: noted(make()))

    names = [device_name(k) for k in range(devices)]
    with pytest.MonkeyPatch.context() as patch, daemons(devices) as there:
        patch.setattr(FrameStream, "send", noting)
        patch.setattr(FrameStream, "send_later", noting_later)
        Work().remote(plan_of(names, [4 // devices] * devices), there)
    return frames


def loading(frames: Sequence[Frame]) -> list[Frame]:
    """Return LOAD and the PARTs of a round on one device."""
    load = next(each for each in frames if each.kind == FrameKind.LOAD)
    wanted = description_of(load)["span"]["blocks"]
    parts = [each for each in frames if each.kind == FrameKind.PART]
    return [load, *parts[:wanted]]


def description_of(load: Frame) -> dict[str, Any]:
    """Return the description that LOAD contains."""
    tree: dict[str, Any] = json.loads(as_bytes(load.tensors[0]))
    return tree


def described(load: Frame, tree: object) -> Frame:
    """Return LOAD with another description."""
    return replace(load, tensors=(as_tensor(json.dumps(tree).encode()),))


_VALUES = (-1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1e308, math.nan, math.inf, None, True)
_VALUES += ("", "x", "x" * 10**5, "\n\x1b[2J", [], {}, [[[]]], [1] * 1000, {"kind": "lora"})
_NUMBERS = (0, 1, 2, 3, 4, 8, 255, 2**16 - 1)


class Mutator:
    """Damages real frames; ``seed`` determines how."""

    def __init__(self, frames: Sequence[Frame], seed: int) -> None:
        self._frames, self._random = frames, random.Random(seed)

    def message(self) -> bytes:
        """Return a message with a damaged frame or description."""
        frame = self._random.choice(self._frames)
        if frame.kind == FrameKind.LOAD and self._random.random() < 0.8:
            frame = described(frame, self._other(description_of(frame)))
            return as_message(frame.kind, encode(frame))
        damage = (self._flipped, self._cut, self._spliced, self._headed, self._shaped)
        data = self._random.choice(damage)(bytearray(encode(frame)))
        message = bytearray(as_message(frame.kind, bytes(data)))
        if self._random.random() < 0.05:
            message[0] = self._random.randrange(256)
        return bytes(message)

    def frame(self, *kinds: FrameKind) -> Frame:
        """Return an undamaged frame of one of these kinds."""
        return self._random.choice([each for each in self._frames if each.kind in kinds])

    def chance(self, share: float) -> bool:
        """Return True with probability ``share``."""
        return self._random.random() < share

    def _flipped(self, data: bytearray) -> bytearray:
        for _ in range(self._random.randrange(1, 9)):
            within = len(data) if self._random.random() < 0.5 else min(len(data), 64)
            data[self._random.randrange(within)] ^= 1 << self._random.randrange(8)
        return data

    def _cut(self, data: bytearray) -> bytearray:
        return data[: self._random.randrange(len(data))]

    def _spliced(self, data: bytearray) -> bytearray:
        other = encode(self._random.choice(self._frames))
        return data[: self._random.randrange(len(data))] + other[self._random.randrange(64) :]

    def _headed(self, data: bytearray) -> bytearray:
        """Overwrite the kind, number of tensors, epoch, round, step or micro-batch."""
        form, at = self._random.choice(
            (("B", 4), ("B", 5), ("H", 6), ("I", 8), ("I", 12), ("I", 16))
        )
        most = 256 ** struct.calcsize(form)
        number = self._random.choice((*_NUMBERS, self._random.randrange(most), most - 1))
        struct.pack_into(f"<{form}", data, at, number % most)
        return data

    def _shaped(self, data: bytearray) -> bytearray:
        """Overwrite the dtype, number of dimensions or size of the first tensor."""
        if len(data) >= 28:
            form, at = self._random.choice((("B", 20), ("B", 21), ("I", 24)))
            most = 256 ** struct.calcsize(form)
            number = self._random.choice((*_NUMBERS, self._random.randrange(most), most - 1))
            struct.pack_into(f"<{form}", data, at, number % most)
        return data

    def _other(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Change one value in a description, or add or remove a key."""
        place = tree
        while (inner := [v for v in place.values() if isinstance(v, dict)]) and self.chance(0.6):
            place = self._random.choice(inner)
        key = self._random.choice([*place, "more"])
        if self.chance(0.1):
            place.pop(key, None)
        else:
            place[key] = self._random.choice(_VALUES)
        return tree


def numbers(*values: float) -> torch.Tensor:
    """Return the numbers as a tensor, in the form that BEGIN and STEP carry."""
    return torch.tensor(values, dtype=torch.float64)
