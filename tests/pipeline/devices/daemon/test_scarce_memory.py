"""A segment that nearly fills its device's memory."""

import pytest
from device_cluster import Work, daemons, plan_of

from pipeline.devices.daemon import held_segment


@pytest.mark.parametrize(("needed_bytes", "scarce"), [(7.4e8, False), (7.6e8, True)])
def test_memory_is_scarce_if_a_segment_needs_more_than_three_quarters(
    monkeypatch: pytest.MonkeyPatch, needed_bytes: float, scarce: bool
) -> None:
    calls = list[bool]()
    monkeypatch.setattr(held_segment, "return_large_blocks", lambda scarce: calls.append(scarce))
    work = Work(needed_bytes=needed_bytes)
    with daemons(1, memory_bytes=1e9) as there, work.segments(plan_of(["device-0"], (4,)), there):
        assert calls == [scarce]
