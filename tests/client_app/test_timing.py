"""Chunks are timed on a device, or the cause why not is told."""

import pytest
from device_cluster import INSECURE, SMALL, Work, daemons, neighbours

from client_app.timing import chunk_seconds
from collapipe.errors import LinkError

SIZES = 2, (1, 4), 6, 3  # blocks, samples, tokens and repeats


def test_a_device_times_its_chunks() -> None:
    with daemons(1) as there:
        seconds = chunk_seconds(
            neighbours(there)[0], INSECURE, SMALL, Work().start, 2, (1, 4), 6, 3
        )
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_a_device_that_refuses_ends_the_timing_with_its_words() -> None:
    with (
        daemons(1, memory_bytes=1e4) as there,
        pytest.raises(LinkError, match=r"device-0.*--memory"),
    ):
        chunk_seconds(neighbours(there)[0], INSECURE, SMALL, Work().start, *SIZES)
