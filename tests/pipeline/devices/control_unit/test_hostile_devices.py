"""A device that reports invalid messages is lost; the round continues with the same bits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from device_cluster import UNIT, Result, Work, daemons, device_name, plan_of

from collapipe.errors import StageError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.wire.frames import Frame, FrameKind
from pipeline.devices.control_unit import loading, placement
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.server import Daemon
from pipeline.devices.daemon.session import Session
from pipeline.devices.hops import HopError, StreamPorts, UndialledError
from pipeline.schedule import Action
from pipeline.stage import Passed

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


@pytest.fixture(scope="module")
def expected() -> Result:
    """The round without a loss."""
    return Work().inline(PLAN)


@contextmanager
def reporting(error: Exception) -> Iterator[list[Daemon]]:
    """Three daemons, of which the second one reports ``error`` at each BEGIN, at most four times:
    then a failing test ends, too."""
    begin, reports = Session._begin, [error] * 4
    with daemons(3) as there, pytest.MonkeyPatch.context() as patch:

        def refuse(self: Session, frame: Frame) -> None:
            if there[1]._session is self and reports:
                raise reports.pop()
            begin(self, frame)

        patch.setattr(Session, "_begin", refuse)
        yield there


def test_an_impossible_neighbour_in_a_report_is_the_reporters_fault(expected: Result) -> None:
    with reporting(HopError("before-" + "9" * 5000, "x")) as there:
        assert Work().remote(PLAN, there, lost=[NAMES[1]]).equals(expected)


@pytest.mark.parametrize(("relay", "neighbour"), [(True, "before-0"), (False, "behind-0")])
def test_a_device_that_was_not_to_dial_cannot_report_that_it_failed_to(
    relay: bool, neighbour: str, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reports would repeat the recovery for ever. With relayed hops, and after the first report
    they are relayed, no device dials."""
    monkeypatch.setattr(placement, "SILENT_S", 0.0)  # so that another cause would appear
    with reporting(UndialledError(neighbour, "no route")) as there:
        assert Work(relay=relay).remote(PLAN, there, lost=[NAMES[1]]).equals(expected)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_number_of_tensors_in_an_answer_is_named(count: int) -> None:
    tensors = (torch.zeros(1).double(),) * count
    norms, wanted = (Frame(kind, 1, 0, 0, tensors) for kind in (FrameKind.NORMS, FrameKind.WANTED))
    with pytest.raises(StageError, match=f"sent NORMS with {count} tensors, expected 3"):
        RemoteSegments._taken_norms(Mock(), "a", 1, 6, norms)
    with pytest.raises(StageError, match=f"sent WANTED with {count} tensors, expected 1"):
        loading._wanted(Mock(), wanted)


@contextmanager
def lengthening() -> Iterator[list[Daemon]]:
    """Three daemons, of which the first one appends positions to the activations that it sends."""
    send = StreamPorts.send
    with daemons(3) as there, pytest.MonkeyPatch.context() as patch:

        def longer(self: StreamPorts, action: Action, made: Passed) -> None:
            session = getattr(self.wait, "__self__", None)
            if session is there[0]._session and len(made) == 2:
                made = tuple(torch.cat((each, each), 1) for each in made)
            send(self, action, made)

        patch.setattr(StreamPorts, "send", longer)
        yield there


def test_the_sender_of_too_many_positions_is_lost_before_they_are_computed(
    expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over 30,000 positions takes hours; the next devices would be lost for it."""
    monkeypatch.setattr(placement, "SILENT_S", 0.0)
    with lengthening() as there:
        assert Work().remote(PLAN, there, lost=[NAMES[0]]).equals(expected)


class Stall:
    """Shortens the time after which a device that all others wait for is lost, until it is lost:
    the remaining devices may be slow on a busy machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._usual_s = patch, placement._STALLED_S
        self._running = list[RemoteSegments]()
        run, replanned = RemoteSegments.run, RemoteSegments._replanned

        def replanning(own: RemoteSegments, lost: StageError) -> ClusterPlan:
            patch.setattr(placement, "_STALLED_S", self._usual_s)
            return replanned(own, lost)

        def noted(own: RemoteSegments, *arguments: Any) -> None:
            self._running.append(own)
            run(own, *arguments)

        patch.setattr(RemoteSegments, "run", noted)
        patch.setattr(RemoteSegments, "_replanned", replanning)
        patch.setattr("pipeline.devices.daemon.session.ALIVE_S", 0.05)

    @property
    def finished(self) -> dict[str, int]:
        """The number of actions that each device has reported as finished."""
        known = self._running[0]._placed.connections
        return {name: each.progress[1] for name, each in known.items()}

    def shorten(self, hung_s: float) -> None:
        self._patch.setattr(placement, "_STALLED_S", 0.5 - hung_s)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Stall:
    return Stall(monkeypatch)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_device_that_is_alive_but_never_answers_is_lost(
    silent: int, expected: Result, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it, directly or not. The limit becomes short once they do."""
    begin, work = Session._begin, Work()
    # the actions of devices before the silent one; those after it wait for their first input
    done = {NAMES[k]: 3 if k < silent else 0 for k in range(3)}

    def wait(self: Session, frame: Frame) -> None:
        until = time.monotonic() + 30  # so that a failing test ends
        while there[silent]._session is self and not self.control.over and time.monotonic() < until:
            if stall.finished == done:
                stall.shorten(work.hung_s)
            time.sleep(0.02)
        begin(self, frame)

    monkeypatch.setattr(Session, "_begin", wait)
    with daemons(3) as there:
        assert work.remote(PLAN, there, lost=[NAMES[silent]]).equals(expected)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_device_that_sends_no_gradients_of_a_shared_stage_is_lost(
    silent: int, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the stage have sent theirs, and are not lost."""
    names, work, norms = NAMES[:2], Work(), Session._norms
    shares = tuple(Share(name, 1) for name in names)
    plan = ClusterPlan(UNIT, (SegmentPlan(names[0], Span(0, 4), shares),), 3, "gpipe")
    with daemons(2) as there:
        expected = work.remote(plan, there)

    def keep_quiet(self: Session, held: HeldSegment, frame: Frame) -> list[float]:
        if there[silent]._session is self:
            honest = names[1 - silent]
            self._wait(lambda: stall.finished[honest] > 6)  # two actions of three micro-batches
            stall.shorten(work.hung_s)
            self._wait(lambda: False)
        return norms(self, held, frame)

    monkeypatch.setattr(Session, "_norms", keep_quiet)
    with daemons(2) as there:
        assert work.remote(plan, there, lost=[names[silent]]).equals(expected)
