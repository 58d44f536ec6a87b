"""Devices that share segments: the same bits as in one thread, also after losses."""

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collapipe.models.lora import LoraSpec
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.state import Precision
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams import FrameStream
from pipeline.devices.control_unit import placement
from pipeline.devices.control_unit.connection import DeviceConnection
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.daemon.server import Daemon
from pipeline.devices.messages import Wanted
from pipeline.schedule import SCHEDULES
from tests.device_cluster import SMALL, UNIT, Result, Work, daemons, device_name
from tests.huggingface import VOCABULARY, batch_for, spec_of
from tests.planted_faults import Fault, planted
from tests.thorough import chosen


def plan_of(
    *stages: tuple[int, Sequence[tuple[int, int]]], m: int = 2, schedule: str = "one_f_one_b"
) -> ClusterPlan:
    """Stages of so many blocks on devices with these numbers and rows."""
    segments, first = [], 0
    for blocks, members in stages:
        shares = tuple(Share(device_name(k), rows) for k, rows in members)
        own = shares if len(shares) > 1 else ()
        segments.append(SegmentPlan(shares[0].device, Span(first, blocks), own))
        first += blocks
    return ClusterPlan(UNIT, tuple(segments), m, schedule)


ONE = (4, [(0, 1), (1, 2), (2, 2)])
PLANS = {
    "one": (ONE,),
    "mixed": ((1, [(0, 1)]), (2, [(1, 2), (2, 1)]), (1, [(3, 1)])),
    "pairs": ((2, [(0, 1), (1, 1)]), (2, [(2, 1), (3, 2)])),
    "front": ((3, [(3, 3), (1, 1)]), (1, [(0, 1)])),
}


@pytest.mark.parametrize(
    ("name", "m"),
    # the other tests have the other plans with m = 1 and 2
    chosen(itertools.product(PLANS, (1, 2, 5)), [("front", 1), *((name, 5) for name in PLANS)]),
)
def test_remote_equals_inline(name: str, m: int) -> None:
    """With m = 5 a micro-batch has one row, and some devices none."""
    work, plan = Work(), plan_of(*PLANS[name], m=m)
    with daemons(4) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


def test_a_device_without_rows_waits_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive 1 s after those of the devices that have the rows."""
    work, plan, parts = Work(steps=1), plan_of(*PLANS["pairs"], m=5), Placement._parts
    blocks = itertools.count()  # two for each device

    def late(*arguments: Any) -> Any:
        late_s = 0.5 * (next(blocks) in (4, 5))
        for state, make in parts(*arguments):
            yield state, lambda make=make: time.sleep(late_s) or make()

    monkeypatch.setattr(Placement, "_parts", late)
    with daemons(4) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "int8"])
def test_every_option_of_the_transport(schedule: str, wire_dtype: Precision) -> None:
    work = Work(wire_dtype=wire_dtype, recompute=schedule == "gpipe", relay=wire_dtype == "int8")
    plan = plan_of(*PLANS["mixed"], schedule=schedule)
    with ExitStack() as stack:
        assert work.remote(plan, stack.enter_context(daemons(4))).equals(work.inline(plan))


@pytest.mark.parametrize("name", ["one", "pairs"])
def test_no_device_dials_if_hops_are_relayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan = Work(relay=True), plan_of(*PLANS[name])
    monkeypatch.setattr(Daemon, "_dial", None)
    with daemons(4) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


@pytest.mark.parametrize("name", ["mixed", "pairs"])
def test_a_device_sends_its_rows_to_those_that_have_them_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by way of the control unit, which is a neighbour of the first and last stage alone."""
    opened, hop = list[str](), DeviceConnection.hop

    def noted(connection: DeviceConnection, session: str, neighbour: str) -> FrameStream:
        opened.append(neighbour)
        return hop(connection, session, neighbour)

    monkeypatch.setattr(DeviceConnection, "hop", noted)
    with daemons(4) as there:
        Work(steps=1).remote(plan_of(*PLANS[name]), there)
    ends = [len(PLANS[name][stage][1]) for stage in (0, -1)]
    assert opened == ["before-0"] * ends[0] + ["behind-0"] * ends[1]


@pytest.mark.parametrize("kind", ["t5", "llama", "lora"])
def test_families_and_adapters(kind: str, tmp_path: Path) -> None:
    """Two rounds, of which the second continues with the optimisers' state."""
    if kind == "lora":
        work = Work(LoraSpec(SMALL, rank=2, alpha=4.0), steps=1)
    else:
        head = "decoder" if kind == "t5" else "causal"
        spec = spec_of(tmp_path, kind, head)
        work = Work(spec, VOCABULARY, batch_for(head), steps=1)
    last = work.spec.num_blocks - 1
    plan, results = plan_of((1, [(0, 1), (1, 2)]), (last, [(2, 1), (3, 1)])), []
    with daemons(4) as there:
        for run in (work.inline, lambda plan: work.remote(plan, there)):
            results.append(work.after(run(plan)))
        second = [each.inline(plan) for each in results]
        assert second[0].equals(second[1])
        assert results[1].remote(plan, there).equals(second[0])


@pytest.fixture(scope="module")
def expected() -> Result:
    """The round without a loss."""
    return Work(steps=3).inline(plan_of(*PLANS["one"], m=1))


WHEN = [
    ("READY", 1, True),
    ("ACTIVATION", 1, True),
    ("GRADIENT", 2, True),
    ("NORMS", 1, True),
    ("PART", 2, True),
    ("BEGIN", 2, False),
    ("STEP", 1, False),
    ("STEP", 3, False),
]


@pytest.mark.parametrize(
    ("device", "when"),
    chosen(itertools.product(range(3), WHEN), [(k % 3, when) for k, when in enumerate(WHEN)]),
)
def test_a_loss_changes_nothing(device: int, when: tuple[str, int, bool], expected: Result) -> None:
    """The others take the lost device's shares over, the leading one's included."""
    kind, number, sending = when
    with daemons(3) as there:
        fault = Fault(there[device], number, sending, True, kind=kind)
        with planted([fault]):
            lost = [device_name(device)]
            found = Work(steps=3).remote(plan_of(*PLANS["one"], m=1), there, lost=lost)
        assert found.equals(expected)
        assert fault.seen >= fault.number


@pytest.mark.parametrize("every", [1, 2])
def test_a_single_survivor_computes_all_shares(every: int, expected: Result) -> None:
    """Also if it has to repeat steps since the last copy."""
    with daemons(3) as there:
        faults = [Fault(there[0], 9, True, True), Fault(there[1], 14, True, True)]
        with planted(faults):
            lost = [device_name(0), device_name(1)]
            found = Work(steps=3).remote(plan_of(*PLANS["one"], m=1), there, every, lost=lost)
    assert found.equals(expected)


def test_a_loss_beside_other_segments() -> None:
    work, plan = Work(), plan_of(*PLANS["pairs"])
    with daemons(4) as there, planted([Fault(there[2], 2, True, True, kind="GRADIENT")]):
        found = work.remote(plan, there, lost=[device_name(2)])
    assert found.equals(work.inline(plan))


@pytest.mark.parametrize("sender", [1, 2])
def test_who_sends_other_rows_than_planned_is_lost(
    sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the device that receives them, nor another one that sends to it."""
    work, plan, send = Work(), plan_of(*PLANS["pairs"]), FrameStream.send
    monkeypatch.setattr(placement, "SILENT_S", 0.5)
    with daemons(4) as there:

        def fewer(stream: FrameStream, frame: Frame) -> None:
            session = there[sender]._session
            hops = frame.kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT)
            if hops and session is not None and stream in session.neighbours.values():
                frame = replace(frame, tensors=tuple(each[1:] for each in frame.tensors))
            send(stream, frame)

        monkeypatch.setattr(FrameStream, "send", fewer)
        found = work.remote(plan, there, lost=[device_name(sender)])
    assert found.equals(work.inline(plan))


@pytest.mark.parametrize("takes_over", range(3))
def test_a_segment_without_devices_goes_to_another(takes_over: int) -> None:
    """To a device that had none, or to one of a pair, whose shares the other computes."""
    work, plan = Work(steps=3), plan_of(*PLANS["mixed"])
    free, pair = device_name(4), {device_name(1), device_name(2)}
    names = [
        {each.device for each in p.segments[:1]} for p in plan.without({device_name(0)}, [free])
    ]
    assert names == [{free}, *({each} for each in sorted(pair))]
    with daemons(5) as there, planted([Fault(there[0], 2, True, True, kind="ACTIVATION")]):
        lost = [device_name(0)]
        found = work.remote(plan, there, lost=lost, takes_over=takes_over)
    assert found.equals(work.inline(plan))


def test_neighbours_without_shares_become_one_segment() -> None:
    work, plan = Work(steps=3), plan_of((1, [(0, 1)]), (1, [(1, 1)]), (2, [(2, 1), (3, 1)]))
    last = len(list(plan.without({device_name(0)}))) - 1
    with daemons(4) as there, planted([Fault(there[0], 2, True, True, kind="ACTIVATION")]):
        found = work.remote(plan, there, lost=[device_name(0)], takes_over=last)
    assert found.equals(work.inline(plan))


def test_after_a_loss_no_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lead more blocks than before get the optimiser's state of these alone."""
    asked, wanted = list[Wanted](), placement._wanted
    monkeypatch.setattr(
        placement, "_wanted", lambda *args: asked.append(wanted(*args)) or asked[-1]
    )
    plan, first = plan_of(*PLANS["one"], m=1), Work()
    second = first.after(first.inline(plan))
    with daemons(3) as there, planted([Fault(there[1], 1, False, True, kind="BEGIN")]):
        found = second.remote(plan, there, lost=[device_name(1)])
    assert found.equals(second.inline(plan))
    assert [len(each.blocks) for each in asked] == [4, 4, 4, 0, 0]
    assert sum(len(each.states) for each in asked[3:]) in range(1, 5)
