"""Trial rounds time blocks and hops, or report why they cannot."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from device_cluster import INSECURE, SMALL, daemons, neighbours
from huggingface import spec_of

from collapipe.cli.device import hop_times
from collapipe.cli.device.hop_times import Trip, expected_s, hop_trips
from collapipe.cli.device.trial_round import Trial, chunk_seconds
from collapipe.credentials.credentials import load
from collapipe.errors import LinkError
from collapipe.models.lora import LoraSpec
from collapipe.models.stem import StemSpec
from collapipe.state import BlockCost
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import Dialer
from collapipe.wire.streams.frame_stream import FrameStream

TRIAL = Trial(SMALL, BlockCost(0.0, 0.0, 0.0, 0.0, 0.0), tokens=6, batch_size=16, repeats=3)


def test_a_device_times_its_chunks() -> None:
    with daemons(1) as running:
        seconds = chunk_seconds(neighbours(running)[0], INSECURE, TRIAL, 2)
    assert list(map(len, seconds)) == [3, 3]
    assert min(map(min, seconds)) > 0


def test_a_chunk_includes_the_rows_that_a_frozen_stem_appends(tmp_path: Path) -> None:
    """T5's blocks also pass on the table of positions."""
    stem = StemSpec(LoraSpec(spec_of(tmp_path, "t5", "decoder"), rank=3, first_block=2), 2)
    with daemons(1) as running:
        timed = chunk_seconds(neighbours(running)[0], INSECURE, replace(TRIAL, spec=stem), 1)
    assert list(map(len, timed)) == [3, 3]


def test_a_device_that_refuses_ends_the_timing_with_its_error() -> None:
    with (
        daemons(1, memory_bytes=1e4) as running,
        pytest.raises(LinkError, match=r"device-0.*--memory"),
    ):
        chunk_seconds(neighbours(running)[0], INSECURE, TRIAL, 2)


@pytest.mark.parametrize("secured", [False, True])
def test_each_hop_is_timed_for_each_size(secured: bool, tmp_path: Path) -> None:
    folder = tmp_path / "own" if secured else None
    with daemons(2, folder=folder) as running:
        dialer = Dialer(load(folder / "control-unit")) if folder else INSECURE
        found = hop_trips(neighbours(running), dialer, (1, 70_000), 2)
    assert [[trip.num_bytes for trip in trips] for trips in found] == [[128, 69_632]] * 3
    assert all(trip.seconds > 0 for trips in found for trip in trips)


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.GRADIENT])
def test_a_slow_hop_does_not_lengthen_the_times_of_other_hops(
    kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the activations or the gradients of one hop are slow."""
    send, delay_s = FrameStream.send, 0.4

    def slow(stream: FrameStream, frame: Frame) -> None:
        first = stream.peer.startswith("the stage before") and kind == FrameKind.GRADIENT
        dialled = stream.peer.startswith("device-1 (") and kind == FrameKind.ACTIVATION
        if frame.kind == kind and (dialled or first):
            time.sleep(delay_s)
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow)
    with daemons(2) as running:
        found = [trips[0].seconds for trips in hop_trips(neighbours(running), INSECURE, (1,), 3)]
    assert found[1] >= delay_s
    assert found[2] < delay_s


def test_larger_messages_are_expected_to_take_longer() -> None:
    small, larger = Trip(128, 0.01 + 128e-6), Trip(65_536, 0.01 + 65_536e-6)
    assert expected_s([], 2**20) == 0.0
    assert expected_s([small], 2**20) == small.seconds
    assert expected_s([small, larger], 2**20) == pytest.approx(0.01 + 2**20 * 1e-6)


def test_a_slow_hop_is_timed_with_small_messages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest size would take much longer than the time limit."""
    _slow_gradients(monkeypatch, byte_s=1e-5)
    monkeypatch.setattr(hop_times, "_HOP_S", 2.5)
    with daemons(1) as running:
        began = time.monotonic()
        found = hop_trips(neighbours(running), INSECURE, (1, 2**14, 2**22), 1)
    assert time.monotonic() - began < 10.0
    assert [[trip.num_bytes for trip in trips] for trips in found] == [[128, 2**14]] * 2


@pytest.mark.parametrize("fixed_s", [0.0, 4.0])
def test_timing_ends_at_the_time_limit_if_messages_are_not_returned(
    fixed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that were timed before are returned; an empty result is an error."""
    _slow_gradients(monkeypatch, byte_s=1e-4, fixed_s=fixed_s)
    monkeypatch.setattr(hop_times, "_HOP_S", 1.0)
    with daemons(1) as running:
        if fixed_s:
            with pytest.raises(LinkError, match="2 s"):
                hop_trips(neighbours(running), INSECURE, (1, 2**15), 1)
        else:
            found = hop_trips(neighbours(running), INSECURE, (1, 2**15), 1)
            assert [len(trips) for trips in found] == [1, 1]


def _slow_gradients(monkeypatch: pytest.MonkeyPatch, byte_s: float, fixed_s: float = 0.0) -> None:
    """Make devices send gradients to the previous stage slowly."""
    send = FrameStream.send

    def slow(stream: FrameStream, frame: Frame) -> None:
        if frame.kind == FrameKind.GRADIENT and stream.peer.startswith("the stage before"):
            time.sleep(fixed_s + byte_s * sum(each.nbytes for each in frame.tensors))
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow)
