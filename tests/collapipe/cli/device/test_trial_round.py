"""Blocks and hops are timed by trial rounds, or the cause why not is reported."""

import time
from pathlib import Path

import pytest
from device_cluster import INSECURE, SMALL, daemons, neighbours

from collapipe.cli.device.trial_round import Trial, chunk_seconds, hop_trips
from collapipe.credentials.credentials import load
from collapipe.errors import LinkError
from collapipe.state import BlockCost
from collapipe.wire.channels import Dialer
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream

TRIAL = Trial(SMALL, BlockCost(0.0, 0.0, 0.0, 0.0, 0.0), tokens=6, batch_size=16, repeats=3)


def test_a_device_times_its_chunks() -> None:
    with daemons(1) as there:
        seconds = chunk_seconds(neighbours(there)[0], INSECURE, TRIAL, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_a_device_that_refuses_ends_the_timing_with_its_words() -> None:
    with (
        daemons(1, memory_bytes=1e4) as there,
        pytest.raises(LinkError, match=r"device-0.*--memory"),
    ):
        chunk_seconds(neighbours(there)[0], INSECURE, TRIAL, 2)


@pytest.mark.parametrize("secured", [False, True])
def test_each_hop_is_timed_for_each_size(secured: bool, tmp_path: Path) -> None:
    folder = tmp_path / "own" if secured else None
    with daemons(2, folder=folder) as there:
        dialer = Dialer(load(folder / "control-unit")) if folder else INSECURE
        found = hop_trips(neighbours(there), dialer, (1, 70_000), 2)
    assert [[trip.num_bytes for trip in trips] for trips in found] == [[128, 69_632]] * 3
    assert all(trip.seconds > 0 for trips in found for trip in trips)


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.GRADIENT])
def test_what_a_hop_takes_counts_for_it_alone(
    kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the offset of its ends' clocks, in both directions."""
    send, delay_s = FrameStream.send, 0.4

    def slow(stream: FrameStream, frame: Frame) -> None:
        first = stream.peer.startswith("the stage before") and kind == FrameKind.GRADIENT
        dialled = stream.peer.startswith("device-1 (") and kind == FrameKind.ACTIVATION
        if frame.kind == kind and (dialled or first):
            time.sleep(delay_s)
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow)
    with daemons(2) as there:
        found = [trips[0].seconds for trips in hop_trips(neighbours(there), INSECURE, (1,), 3)]
    assert found[1] >= delay_s
    assert found[2] < delay_s
