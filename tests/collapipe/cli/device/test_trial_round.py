"""Chunks are timed on a device, or the cause why not is told."""

import pytest
from device_cluster import INSECURE, SMALL, Work, daemons, neighbours

from collapipe.cli.device.trial_round import Trial, chunk_seconds
from collapipe.errors import LinkError
from collapipe.state import BlockCost

TRIAL = Trial(SMALL, BlockCost(0.0, 0.0, 0.0, 0.0, 0.0), tokens=6, batch_size=16, repeats=3)


def test_a_device_times_its_chunks() -> None:
    with daemons(1) as there:
        seconds = chunk_seconds(neighbours(there)[0], INSECURE, TRIAL, Work().start, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_a_device_that_refuses_ends_the_timing_with_its_words() -> None:
    with (
        daemons(1, memory_bytes=1e4) as there,
        pytest.raises(LinkError, match=r"device-0.*--memory"),
    ):
        chunk_seconds(neighbours(there)[0], INSECURE, TRIAL, Work().start, 2)
