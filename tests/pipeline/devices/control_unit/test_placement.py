"""The description that a device receives of its segment."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from pytest import MonkeyPatch

from collapipe.errors import StageError
from collapipe.models.description import describe
from collapipe.plan import SegmentPlan, Share, Span
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import Channels, Dialer
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit import placement, watch
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.descriptions import describe_segment
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.hops import HopError, Side
from pipeline.devices.messages import RoundDescription
from tests.device_cluster import ADAMW, SMALL, plan_of


def test_planned_memory_counts_kept_micro_batches_rows_and_gradients() -> None:
    """With 1F1B, three stages keep 4, 3 and 2 of 8 micro-batches; a shared stage counts its
    rows."""
    requests, modes, described = [], [], []

    def needed(blocks: int, kept: int, part: float, gradients: int, recompute: bool) -> float:
        requests.append((blocks, kept, part, gradients))
        modes.append(recompute)
        return 0.0

    names = ["a", "b", "c"]
    common = RoundDescription(
        version="0",
        unit=0,
        round=1,
        seed=0,
        model=describe(SMALL),
        recompute=False,
        dtype="float32",
        optimizer=ADAMW,
        replicate_every=1,
    )
    roster = {name: DeviceAddress(name, f"127.0.0.1:{k}") for k, name in enumerate(names, 1)}
    plan = plan_of(names, [1, 1, 1], 8, "one_f_one_b")
    shares = Share("b", 3), Share("c", 1)
    shared = replace(plan, segments=(plan.segments[0], SegmentPlan("b", Span(1, 2), shares)))
    with Channels(Dialer(None)) as channels:
        cluster = Cluster(roster, channels, lambda *_: plan, lambda _: 1.0, needed_bytes=needed)
        second = replace(shared.segments[1], recomputing=("c",))
        other = replace(shared, segments=(shared.segments[0], second))
        for each in (plan, shared, *shared.without("c"), other, *other.without("b")):
            for name in each.devices:
                secrets = dict.fromkeys(names, "s")
                segment = describe_segment(name, each, cluster, common, None, secrets)
                described.append(segment.recompute)
    assert requests[:3] == [(1, 4, 1.0, 0), (1, 3, 1.0, 0), (1, 2, 1.0, 0)]
    assert requests[3:6] == [(1, 3, 1.0, 0), (2, 2, 0.75, 2), (2, 2, 0.25, 0)]
    # a set of gradients for each share
    assert requests[6:8] == [(1, 3, 1.0, 0), (2, 2, 1.0, 2)]
    assert described == modes == [False] * 8 + [False, False, True] + [False, True]


def test_devices_are_not_silent_while_this_process_is_paused(monkeypatch: MonkeyPatch) -> None:
    """A placement notices a pause when it waits and when it chooses the device to drop."""
    now_s, control = [0.0], Mock(last_received_s=0.0)

    def check(hung_s: float) -> None:
        if now_s[0] - control.last_received_s > 5:
            raise StageError("a", "no sign of life")

    def clock() -> float:
        now_s[0] += 0.25
        return now_s[0]

    for module in (placement, watch):
        monkeypatch.setattr(module, "time", Mock(monotonic=clock))
    device = Mock(control=control, check=check, troubles={}, moved_s=0.0)
    cluster = Mock(hung_s=lambda plan: 10.0)
    placed = Placement(plan_of(["a"], [1]), cluster, Mock(), Mock(unreadable=None), {"a": device})
    placed.idle()
    now_s[0] += 1000
    placed.idle()
    heard_s = control.last_received_s
    placed.idle()
    assert placed.watch.awake_s == 0.5 and control.last_received_s == heard_s > 1000
    now_s[0] += 1000
    assert str(placed.blamed(HopError("behind-0", "has not read"))) == "a: has not read"


def test_the_first_or_last_device_with_unread_frames_is_named() -> None:
    stream = FrameStream("a device", 2**20)
    stream.send(Frame(FrameKind.GRADIENT, 1, 0, 0))
    for place, name in (("front", "behind-1"), ("back", "before-1")):
        sides = {"front": Side({}), "back": Side({}), place: Side({1: stream})}
        with pytest.raises(HopError, match="has not read") as found:
            Placement.check_hops(Mock(**sides))
        assert found.value.neighbour == name


@pytest.mark.parametrize("moves", ["device", "hop", "excuse", "pause", ""])
def test_a_device_is_lost_only_if_nothing_moves(moves: str, monkeypatch: MonkeyPatch) -> None:
    """Devices may wait as long as any of them computes, sends or receives something, or the control
    unit is to blame."""
    now_s = 0.0
    for module in (placement, watch):
        monkeypatch.setattr(module, "time", Mock(monotonic=lambda: now_s))
    device, hop = Mock(troubles={}, moved_s=0.0), Mock(last_moved_s=0.0)
    cluster, replica = Mock(hung_s=lambda plan: 10.0), Mock(waits_for=lambda: "a", unreadable=None)
    own = plan_of(["a"], [1]), cluster, Mock(), replica, {"a": device}
    placed = Placement(*own, arrived=Mock(), hops=[hop])
    for number in range(100):
        now_s += 50.0 if moves == "pause" and number % 25 == 0 else 0.8
        if moves == "excuse":
            placed.watch.reset()
        device.moved_s = now_s if moves == "device" else 0.0
        hop.last_moved_s = now_s if moves == "hop" else 0.0
        if not moves and now_s > 70:
            with pytest.raises(StageError, match="has not answered for 7") as found:
                placed.idle()
            assert found.value.device == "a"
            return
        placed.idle()
    assert moves
