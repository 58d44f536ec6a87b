"""If one device cannot dial another and both are alive, their hops are relayed."""

from collections.abc import Callable
from typing import Any

import pytest
from device_cluster import UNIT, Work, daemons, device_name, plan_of

from collapipe.errors import LinkError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit import placement
from pipeline.devices.daemon.server import Daemon
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

NAMES = [device_name(k) for k in range(2)]
SHARES = Share(NAMES[0], 2), Share(NAMES[1], 1)
SHARED = ClusterPlan(UNIT, (SegmentPlan(NAMES[0], Span(0, 4), SHARES),), 3, "gpipe")
PLANS = pytest.mark.parametrize("plan", [plan_of(NAMES, (2, 2)), SHARED], ids=["hop", "share"])


def dial_that_fails(there: list[Daemon]) -> Callable[..., FrameStream]:
    """``Daemon._dial`` of device 0 as if a firewall blocked the other device."""

    def dial(self: Daemon, *where: Any) -> FrameStream:
        assert self is there[0]
        raise LinkError(f"{NAMES[1]} ({there[1].address}): timed out")

    return dial


@PLANS
def test_hops_are_relayed_if_a_neighbour_cannot_dial_a_device(
    plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is lost and the bits are the same; the event names both devices and the option."""
    monkeypatch.setattr(placement, "SILENT_S", 0.0)  # so that another cause would appear
    work = Work()
    with daemons(2) as there:
        monkeypatch.setattr(Daemon, "_dial", dial_that_fails(there))
        embedding, _, part = work.parts()
        head, m = LocalHead(part), plan.num_micro_batches
        with (
            work.segments(plan, there) as segments,
            Pipeline(m, embedding, segments, head, PhaseTimer()) as pipeline,
        ):
            assert work._trained(pipeline, head).equals(work.inline(plan))
            assert segments.relays and not segments.lost
            (event,) = segments.events
    assert all(each in event for each in (*NAMES, "pipeline.relay=true", "timed out"))
