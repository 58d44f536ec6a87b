"""A step that starts before all weights have arrived has the same result."""

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from device_cluster import Work, daemons, device_name, plan_of
from hostile_peer import HostileUnit, description_of, loading, recorded

from collapipe.plan import SegmentPlan, Share, Span
from collapipe.report import PIPELINE, START
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit import loading as loading_blocks
from pipeline.devices.control_unit.journal import RecordedHead, RecordingPorts, StepRecord
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.daemon.session import Session
from pipeline.devices.hops import TimedPorts
from pipeline.devices.messages import BEFORE, BEHIND, neighbour_name
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer
from pipeline.schedule import BACKWARD, FORWARD, Action


def norms(address: str, frames: list[Frame], early: int) -> torch.Tensor:
    """The squared norms after the first step, which starts when ``early`` parts have been sent."""
    with HostileUnit(address) as unit:
        return norms_of(unit, frames, early)


def norms_of(unit: HostileUnit, frames: list[Frame], early: int) -> torch.Tensor:
    load, *parts = loading(frames)
    assert unit.load([load, *parts[:early]])
    session = description_of(load)["session"]
    before, following = (unit.hop(session, neighbour_name(side, 0)) for side in (BEFORE, BEHIND))
    to = {
        FrameKind.BEGIN: unit.control,
        FrameKind.ACTIVATION: before,
        FrameKind.GRADIENT: following,
    }
    own = {(each.kind, each.micro_batch): each for each in reversed(frames) if each.step == 0}
    for (kind, _), frame in reversed(own.items()):  # the device's answers are not sent to it
        if kind in to:
            to[kind].send_frame(frame)
    for part in parts[early:]:
        unit.control.send_frame(part)
    while (answer := unit.control.receive()).kind != FrameKind.NORMS:
        assert answer.kind in (FrameKind.ALIVE, FrameKind.BUILT, FrameKind.CLOCK)
    return answer.tensors[0]


def test_an_early_step_has_the_norms_of_a_step_after_all_weights() -> None:
    frames = recorded()
    every = len(loading(frames)) - 1
    with daemons(1) as (daemon,):
        expected = norms(daemon.address, frames, every)
        for early in range(every):
            assert torch.equal(norms(daemon.address, frames, early), expected)


@pytest.mark.parametrize(
    ("moved", "expected"), [("busy", 0), ("control", 100), ("neighbour", 200), ("work", 300)]
)
def test_a_sign_of_life_says_for_how_long_nothing_has_moved(moved: str, expected: int) -> None:
    """Otherwise the control unit would drop a device that works or waits for a slow link."""
    control, neighbour = FrameStream("the control unit", 100), FrameStream("a neighbour", 100)
    none: Any = None
    session = Session(control, none, none, threading.Event(), threading.Event())
    session.neighbours["behind-0"] = neighbour
    now = time.monotonic()
    control.last_moved_s = now - (100 if moved == "control" else 400)
    neighbour.last_moved_s = now - (200 if moved == "neighbour" else 400)
    session.activity.moved_s = now - 300
    session.activity.busy_since = now - 300 if moved == "busy" else None
    sent = list[Frame]()
    looks: Any = Mock(wait=lambda _: bool(sent))
    control.send = sent.append  # type: ignore[method-assign]
    session._signs_of_life(looks)
    busy_s, still_s, finished = sent[0].tensors[0].tolist()
    assert still_s == pytest.approx(expected, abs=40)
    assert busy_s == pytest.approx(300 if moved == "busy" else 0, abs=40)
    assert (sent[0].kind, finished) == (FrameKind.ALIVE, 0)


def test_waiting_for_weights_is_neither_busy_nor_compute_time() -> None:
    """Otherwise the control unit would drop the device, or plan with too long times."""
    streams, arrived = FrameStream("the control unit", 100), threading.Event()
    none: Any = None
    session = Session(streams, none, none, arrived, threading.Event())
    hops: Any = SimpleNamespace(receive=lambda action: (), send=lambda action, made: None)
    ports, action = TimedPorts(hops, (), session.activity.set_busy, arrived), Action(FORWARD, 0)
    began_s = time.monotonic()
    ports.receive(action)
    seen = list[float | None]()

    def has(block: str) -> bool:
        seen.append(session.activity.busy_since)
        time.sleep(0.05)
        arrived.set()
        return len(seen) > 2

    held: Any = SimpleNamespace(has=has)
    session._wait_for(held, ports, "blocks.0")
    ports.send(action, ())
    assert seen == [None] * len(seen)
    requested_s, _, ended_s, _ = ports.table()[0].tolist()
    assert requested_s - began_s >= 0.1
    assert ended_s - requested_s < 0.05


@pytest.mark.parametrize("steps", [1, 3])
def test_times_of_steps_leave_out_the_arrival_of_weights(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrival counts as the round's start; otherwise the next plan would include it."""
    make = loading_blocks._part

    def late(*arguments: Any) -> Frame:
        time.sleep(0.8)
        return make(*arguments)

    monkeypatch.setattr(loading_blocks, "_part", late)
    work, names = Work(steps=steps), [device_name(k) for k in range(2)]
    plan = plan_of(names, [2, 2])
    embedding, _, part = work.parts()
    head = LocalHead(part)
    with daemons(2) as own, work.segments(plan, own) as segments:
        with Pipeline(plan.num_micro_batches, embedding, segments, head, PhaseTimer()) as pipeline:
            work._trained(pipeline, head)
        times, phases = segments.step_times(), segments._timer.seconds
    assert times is not None
    assert times.step_s < 0.7
    assert phases[PIPELINE] == pytest.approx(steps * times.step_s, rel=0.2)
    assert phases[START] > 1.2
    assert max(times.send_s.values()) < 0.4


def test_later_activations_wait_until_the_first_segment_is_built() -> None:
    built = False
    inner: Any = SimpleNamespace(holds=lambda action: True, receive=None)
    ports = RecordingPorts(inner, StepRecord(0, [(1, 1), (1, 1)]), (), lambda: built)
    actions = Action(FORWARD, 0), Action(FORWARD, 1), Action(BACKWARD, 0), Action(BACKWARD, 1)
    assert [ports.holds(each) for each in actions] == [True, False, True, True]
    built = True
    assert all(ports.holds(each) for each in actions)


def test_a_segment_is_built_if_all_its_devices_have_the_weights_of_this_plan() -> None:
    pair = SegmentPlan("a", Span(0, 1), (Share("a", 1), Share("b", 1)))
    for a, b in ((2, 2), (1, 2), (2, 1), (-1, -1)):
        connections = {"a": SimpleNamespace(built=a), "b": SimpleNamespace(built=b)}
        own: Any = SimpleNamespace(connections=connections, common=SimpleNamespace(epoch=2))
        assert Placement.is_built(own, pair) == (a == b == 2)


def test_a_decoder_that_has_not_answered_delays_the_devices() -> None:
    """They are not to blame, however long it takes."""
    record, placed = StepRecord(0, [(1, 1)]), Mock()
    head = RecordedHead(Mock(backward=lambda micro_batch, received: ()), record)
    own: Any = SimpleNamespace(_placed=placed)
    RemoteSegments._idle(own, head)
    assert not placed.watch.reset.called
    head.forward(0, ())
    RemoteSegments._idle(own, head)
    assert placed.watch.reset.call_count == 1
    head.backward(0, ())
    RemoteSegments._idle(own, head)
    assert placed.watch.reset.call_count == 1 and placed.idle.call_count == 3
