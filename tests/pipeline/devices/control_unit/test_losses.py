"""A round that loses devices at any point has the bits of a round without losses."""

import random
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cluster import CLIP, RATE, SEED, UNIT, Result, Work, daemons, device_name, plan_of
from planted_faults import Fault, planted

from collapipe.errors import LinkError, RoundFailedError, StorageError
from collapipe.models.dropout import DropoutKey
from collapipe.report import PIPELINE, START
from collapipe.tensors import Tensors
from collapipe.wire.parts import mapped_part
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.server import Daemon
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


def points(count: int, seed: int) -> list[tuple[int, int, bool, bool]]:
    """Random faults: device, frame number, on sending or receiving, before or after the frame."""
    drawn = random.Random(seed)
    return [
        (drawn.randrange(3), drawn.randrange(1, 17), drawn.random() < 0.5, drawn.random() < 0.5)
        for _ in range(count)
    ]


def chosen_of(count: int, seed: int) -> list[Any]:
    """``points`` as test parameters; the second half only runs in thorough tests."""
    drawn = points(count, seed)
    late = (pytest.param(each, marks=pytest.mark.thorough) for each in drawn[count // 2 :])
    return [*drawn[: count // 2], *late]


SENT = {
    "READY": 1,
    "BUILT": 1,
    "ACTIVATION": 6,
    "GRADIENT": 6,
    "NORMS": 2,
    "PART": 2,
    "CREDIT": 3,
    "CLOCK": 3,
}
TAKEN = {"LOAD": 1, "PART": 1, "OPEN": 1, "CLOCK": 3, "BEGIN": 2, "STEP": 2}
# each device receives at least this number of frames of the kind
TAKEN |= {"ACTIVATION": 6, "GRADIENT": 6}


def points_of_kinds(count: int, seed: int) -> list[tuple[int, str, int, bool, bool]]:
    """Faults at each kind of frame in turn: device, kind, number, on sending, before the frame."""
    drawn, found = random.Random(seed), list[tuple[int, str, int, bool, bool]]()
    while len(found) < count:
        for before in (True, False):
            for sending, kinds in ((True, SENT), (False, TAKEN)):
                for kind, most in kinds.items():
                    number = drawn.randrange(1, most + 1)
                    found.append((drawn.randrange(3), kind, number, sending, before))
    return found[:count]


@pytest.fixture(scope="module")
def expected() -> Result:
    """The round without a loss."""
    return Work().inline(PLAN)


@pytest.mark.parametrize("point", chosen_of(12, 0), ids=str)
def test_a_fault_at_a_random_frame_does_not_change_the_bits(
    point: tuple[int, int, bool, bool], expected: Result
) -> None:
    device, *when = point
    with daemons(3) as there:
        fault = Fault(there[device], *when)
        with planted([fault]):
            found = Work().remote(PLAN, there, lost=[NAMES[device]])
        assert found.equals(expected)
        assert fault.seen >= fault.number


@pytest.mark.faults
@pytest.mark.parametrize("point", points_of_kinds(50, 1), ids=str)
def test_a_fault_at_each_kind_of_frame_does_not_change_the_bits(
    point: tuple[int, str, int, bool, bool], expected: Result
) -> None:
    device, kind, *when = point
    lost = [NAMES[device]] if kind != "CLOCK" else []  # clocks are read last
    with daemons(3) as there:
        fault = Fault(there[device], *when, kind=kind)  # type: ignore[arg-type]
        with planted([fault]):
            found = Work().remote(PLAN, there, lost=lost)
        assert found.equals(expected)
        assert fault.seen >= fault.number


@pytest.mark.parametrize(("may_take_s", "lost"), [(60.0, 0), (0.0, 1)])
def test_a_device_that_imports_libraries_has_a_longer_time_limit(
    may_take_s: float, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may need libraries that a small device imports slowly; this time is limited too."""
    real, noticed, hung_s = Daemon._hold, threading.Event(), 2.5

    def slow(self: Daemon, *arguments: Any) -> HeldSegment:
        if self is there[1]:  # until the loss is noticed, or longer than the usual limit
            noticed.wait(60.0 if lost else 1.4 * hung_s)
        return real(self, *arguments)

    monkeypatch.setattr(Daemon, "_hold", slow)
    monkeypatch.setattr("pipeline.devices.daemon.session._IMPORTS_S", may_take_s)
    work = Work(hung_s=hung_s)
    with daemons(3) as there, work.segments(PLAN, there) as segments:
        noticed.set()
        assert len(segments.lost) == lost


def test_a_fault_does_not_change_the_bits_if_hops_are_relayed(expected: Result) -> None:
    work = Work(relay=True)
    with daemons(3) as there, planted([Fault(there[1], 9, True, True)]):
        assert work.remote(PLAN, there, lost=[NAMES[1]]).equals(expected)


def test_two_of_three_devices_may_be_lost(expected: Result) -> None:
    """The second device is lost during the recovery from the first loss."""
    with daemons(3) as there:
        faults = [Fault(there[1], 9, True, True), Fault(there[0], 14, True, True)]
        with planted(faults):
            assert Work().remote(PLAN, there, lost=NAMES[:2]).equals(expected)


def test_the_round_fails_if_all_devices_are_lost() -> None:
    with daemons(2) as there:
        faults = [Fault(each, 9, True, True) for each in there]
        with planted(faults), pytest.raises(RoundFailedError, match="no device is left"):
            Work().remote(plan_of(NAMES[:2], (2, 2)), there)


@pytest.mark.parametrize("sending", [False, True])
def test_a_copy_that_this_machine_cannot_read_is_no_loss_of_a_device(
    sending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are read again while their parts are sent, in other threads."""

    def unreadable(file: Path) -> Tensors:
        if sending and threading.current_thread() is threading.main_thread():
            return mapped_part(file)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pipeline.devices.control_unit.replica.mapped_part", unreadable)
    with (
        daemons(3) as there,
        planted([Fault(there[1], 4, sending=False, before=True, kind="STEP")]),
        pytest.raises(StorageError, match=r"cannot read the copy of blocks.*Too many open"),
    ):
        Work(steps=4).remote(PLAN, there)


def test_a_device_that_cannot_dial_a_lost_neighbour_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed call is reported before the end of the neighbour is detected."""
    dial, work, ending = Daemon._dial, Work(), list[threading.Timer]()

    def dialling(self: Daemon, *where: Any) -> FrameStream:
        if self is there[0] and not ending:
            ending.append(threading.Timer(0.3, there[1]._server.stop, (None,)))
            ending[0].start()
            raise LinkError("no answer")
        return dial(self, *where)

    monkeypatch.setattr(Daemon, "_dial", dialling)
    with daemons(3) as there, work.segments(PLAN, there) as segments:
        assert set(segments.lost) == {NAMES[1]}
        assert [each.device for each in segments.plan.segments] == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize("lost", [(), (NAMES[1],)])
def test_a_round_of_one_step_waits_for_its_optimiser_state(
    lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state arrives late; later requests of the control unit do not overtake it."""
    begun = Work(steps=1)
    work = begun.after(begun.inline(PLAN))
    real = Replica.packed

    def late(self: Replica, name: str, keys: Collection[str]) -> torch.Tensor:
        if any("/" in key for key in keys):
            time.sleep(0.1)
        return real(self, name, keys)

    monkeypatch.setattr(Replica, "packed", late)
    with daemons(3) as there:
        for name in lost:
            there[NAMES.index(name)].__exit__()
        found = work.remote(PLAN, there, lost=lost)
    assert found.equals(work.inline(PLAN))


def test_a_loss_after_the_last_step_does_not_reduce_the_pipeline_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another device loads its blocks for longer than the step took; this time counts as start
    time. The server refuses times below 0."""
    work, real, taken_s = Work(steps=1), Replica.packed, 0.0

    def slow(self: Replica, name: str, keys: Collection[str]) -> torch.Tensor:
        time.sleep(taken_s)
        return real(self, name, keys)

    monkeypatch.setattr(Replica, "packed", slow)
    embedding, _, part = work.parts()
    head, timer = LocalHead(part), PhaseTimer()
    with daemons(3) as there, work.segments(PLAN, there, every=0) as segments:
        with Pipeline(PLAN.num_micro_batches, embedding, segments, head, timer) as pipeline:
            pipeline.run(work.batch, DropoutKey(SEED, UNIT, 0))
            pipeline.step(RATE, CLIP)
            step_s, taken_s = segments._timer.seconds[PIPELINE], 0.2
            there[1].__exit__()
            pipeline.weights()
        assert set(segments.lost) == {NAMES[1]}
        assert segments._timer.seconds[PIPELINE] > step_s
        assert segments._timer.seconds[START] > taken_s
