"""The control unit waits for a busy device for a limited time, then treats it as lost."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_cluster import Work, daemons, device_name, even_plan, plan_of

from collapipe.errors import BusyLinkError, CancelledRoundError, StageError
from collapipe.process import cancellation
from collapipe.wire.frames import FrameKind
from pipeline.devices.control_unit import dialling, loading
from pipeline.devices.control_unit.connection import DeviceConnection
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.server import Daemon
from pipeline.devices.daemon.session import Session

NAMES = [device_name(k) for k in range(2)]
PLAN = plan_of(NAMES, (2, 2))


@contextmanager
def left_in_an_action(
    there: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Daemons in the middle of a step whose control unit has disconnected, as after a cancelled
    round. Yields a function that lets the step continue."""
    began, go_on, stage = threading.Semaphore(0), threading.Event(), HeldSegment.stage

    def slow(self: HeldSegment, *arguments: Any) -> object:
        began.release()
        assert go_on.wait(60)
        return stage(self, *arguments)

    monkeypatch.setattr(HeldSegment, "stage", slow)
    with Work().segments(even_plan(NAMES[: len(there)], 4, PLAN), there) as segments:
        segments._placed.send_to_all(FrameKind.BEGIN, 0, torch.tensor([[3, 7]]))
        for _ in there:
            assert began.acquire(timeout=60)
    try:
        yield go_on.set
    finally:
        go_on.set()


def when_refused(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> list[str]:
    """Run ``call`` each time a device refuses a control unit; return the list of the devices'
    names."""
    names = list[str]()

    class Refused(DeviceConnection):
        def __init__(self, *arguments: Any) -> None:
            try:
                super().__init__(*arguments)
            except StageError as error:
                names.append(error.device)
                call()
                raise

    monkeypatch.setattr(loading, "DeviceConnection", Refused)
    return names


def test_all_devices_are_connected_and_asked_for_their_clock_in_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call blocks until the call for the other device has started."""
    met = threading.Barrier(2)
    for owner, name in ((DeviceConnection, "__init__"), (Session, "_send_time")):
        real = getattr(owner, name)

        def together(*arguments: Any, real: Any = real) -> None:
            met.wait(10)
            real(*arguments)

        monkeypatch.setattr(owner, name, together)
    with daemons(2) as there, Work().segments(PLAN, there) as segments:
        segments.collect()
        assert not segments.lost
        assert segments._placed.clocks.keys() == set(NAMES)


def test_a_lost_device_does_not_extend_the_wait_for_a_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The busy device ends its action after its refusal, and is then connected."""
    with daemons(2) as there, left_in_an_action(there[:1], monkeypatch) as let_go_on:
        there[1].__exit__()

        def go_on_after_the_busy_one() -> None:  # both are dialled in parallel
            if NAMES[0] in refused:
                let_go_on()

        refused = when_refused(monkeypatch, go_on_after_the_busy_one)
        with Work().segments(PLAN, there) as segments:
            assert set(segments.lost) == {NAMES[1]}
    assert set(refused) == set(NAMES)


def test_devices_that_finish_their_action_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A log message names each awaited device once."""
    monkeypatch.setattr(dialling, "_LONG_S", -1.0)
    with daemons(2) as there, left_in_an_action(there, monkeypatch) as let_go_on:
        refused = when_refused(monkeypatch, let_go_on)
        with Work().segments(PLAN, there) as segments:
            assert not segments.lost
    assert refused  # the first refusal lets both steps continue, so the other device may not refuse
    logged = [each.getMessage().split(":")[0] for each in caplog.records]
    waits = [each for each in logged if each.startswith("waiting")]
    assert sorted(waits) == sorted(f"waiting for {name}" for name in set(refused))


class Impatient(Work):
    """The time limit of an action is 0 s for the first plan, then 60 s."""

    bounds = iter([0.0])

    @property  # type: ignore[override]
    def hung_s(self) -> float:
        return next(self.bounds, 60.0)

    @hung_s.setter
    def hung_s(self, value: float) -> None:
        """Ignore the initial value."""


def test_a_device_that_stays_busy_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        daemons(2) as there,
        left_in_an_action(there[1:], monkeypatch),
        Impatient().segments(PLAN, there) as segments,
    ):
        assert set(segments.lost) == {NAMES[1]}


def test_two_control_units_that_hold_devices_of_each_other_do_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each already has one of three devices and dials all; the first to have all leaves."""
    monkeypatch.setattr(dialling, "_LONG_S", -1.0)
    monkeypatch.setattr(dialling, "_BUSY_S", 0.01)
    names, served = ["a", "b", "c"], {"a": 0, "c": 1}
    one_at_a_time, ended = threading.Lock(), list[int]()

    def connect(unit: int) -> None:
        def dial(name: str) -> None:
            with one_at_a_time:
                if served.setdefault(name, unit) != unit:
                    raise StageError(name, "busy") from BusyLinkError()

        def release(name: str) -> None:
            with one_at_a_time:
                if served.get(name) == unit:
                    del served[name]

        dialling.dial_all(names, dial, release, hung_s=20.0, busy_s=None)
        with one_at_a_time:
            assert served == dict.fromkeys(names, unit)
        ended.append(unit)
        for each in names:
            release(each)

    units = [threading.Thread(target=connect, args=(unit,), daemon=True) for unit in range(2)]
    for each in units:
        each.start()
    for each in units:
        each.join(10)
    assert sorted(ended) == [0, 1]


def test_a_cancelled_round_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        daemons(2) as there,
        left_in_an_action(there, monkeypatch),
        cancellation.cancellable() as scope,
    ):
        when_refused(monkeypatch, scope.cancel)
        with pytest.raises(CancelledRoundError):
            Work().remote(PLAN, there)
