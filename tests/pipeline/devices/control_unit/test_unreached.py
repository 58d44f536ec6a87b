"""Devices of which one cannot dial the other, though both live: their hops are relayed."""

from collections.abc import Callable
from typing import Any

import pytest
from device_cluster import UNIT, Work, daemons, device_name, plan_of

from collapipe.errors import LinkError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.wire.streams import FrameStream
from pipeline.devices.control_unit import placement
from pipeline.devices.daemon.server import Daemon
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

NAMES = [device_name(k) for k in range(2)]
SHARES = Share(NAMES[0], 2), Share(NAMES[1], 1)
SHARED = ClusterPlan(UNIT, (SegmentPlan(NAMES[0], Span(0, 4), SHARES),), 3, "gpipe")
PLANS = pytest.mark.parametrize("plan", [plan_of(NAMES, (2, 2)), SHARED], ids=["hop", "share"])


def unable(there: list[Daemon]) -> Callable[..., FrameStream]:
    """``Daemon._dial`` behind a firewall."""

    def dial(self: Daemon, *where: Any) -> FrameStream:
        assert self is there[0]
        raise LinkError(f"{NAMES[1]} ({there[1].address}): timed out")

    return dial


@PLANS
def test_no_device_is_lost_that_only_a_neighbour_cannot_dial(
    plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names both ends and the option; the bits are the same."""
    monkeypatch.setattr(placement, "SILENT_S", 0.0)  # for another cause to show
    work = Work()
    with daemons(2) as there:
        monkeypatch.setattr(Daemon, "_dial", unable(there))
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
