"""Devices that share segments compute the bits of one thread, also after losses."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe.models.lora import LoraSpec
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.state import Precision
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit import loading, placement
from pipeline.devices.control_unit.connection import DeviceConnection
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
    """A plan with a stage for each (number of blocks, [(device number, rows), …])."""
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
    # other tests cover the other plans with m = 1 and 2
    chosen(itertools.product(PLANS, (1, 2, 5)), [("front", 1), *((name, 5) for name in PLANS)]),
)
def test_a_round_with_shared_segments_has_the_bits_of_one_thread(name: str, m: int) -> None:
    """With m = 5, a micro-batch has one row, and some devices have no row."""
    work, plan = Work(), plan_of(*PLANS[name], m=m)
    with daemons(4) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


def test_a_device_without_rows_waits_for_late_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights arrive 1 s after the weights of devices with rows."""
    work, plan = Work(steps=1), plan_of(*PLANS["pairs"], m=5)
    send_later, slow = FrameStream.send_later, plan.devices[2]

    def late(stream: FrameStream, make: Callable[[], Frame]) -> None:
        late_s = 0.5 * (stream.peer == slow)  # for each of its two blocks

        def made() -> Frame:
            time.sleep(late_s)
            return make()

        send_later(stream, made)

    monkeypatch.setattr(FrameStream, "send_later", late)
    with daemons(4) as there:
        assert work.remote(plan, there).equals(work.inline(plan))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "int8"])
def test_each_wire_type_and_schedule_has_the_bits_of_one_thread(
    schedule: str, wire_dtype: Precision
) -> None:
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
def test_devices_send_rows_directly_to_the_devices_of_the_next_stage(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only devices of the first and last stage have hops to the control unit."""
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
def test_families_and_adapters_have_the_bits_of_one_thread(kind: str, tmp_path: Path) -> None:
    """The second of two rounds continues with the optimiser state of the first."""
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
def test_a_loss_in_a_shared_segment_does_not_change_the_bits(
    device: int, when: tuple[str, int, bool], expected: Result
) -> None:
    """The other devices compute the lost device's shares, also if it was the leading device."""
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
    """With ``every=2`` it may have to repeat steps since the last copy."""
    with daemons(3) as there:
        faults = [Fault(there[0], 9, True, True), Fault(there[1], 14, True, True)]
        with planted(faults):
            lost = [device_name(0), device_name(1)]
            found = Work(steps=3).remote(plan_of(*PLANS["one"], m=1), there, every, lost=lost)
    assert found.equals(expected)


def test_a_loss_in_one_of_two_shared_segments_does_not_change_the_bits() -> None:
    work, plan = Work(), plan_of(*PLANS["pairs"])
    with daemons(4) as there, planted([Fault(there[2], 2, True, True, kind="GRADIENT")]):
        found = work.remote(plan, there, lost=[device_name(2)])
    assert found.equals(work.inline(plan))


@pytest.mark.parametrize("sender", [1, 2])
def test_a_device_that_sends_fewer_rows_than_planned_is_lost(
    sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the receiving device nor other senders are lost."""
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
def test_another_device_takes_over_a_segment_that_lost_its_device(takes_over: int) -> None:
    """Either a free device, or one device of a pair; then the other computes all shares of the
    pair."""
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


def test_two_segments_without_shares_merge_after_a_loss() -> None:
    work, plan = Work(steps=3), plan_of((1, [(0, 1)]), (1, [(1, 1)]), (2, [(2, 1), (3, 1)]))
    last = len(list(plan.without({device_name(0)}))) - 1
    with daemons(4) as there, planted([Fault(there[0], 2, True, True, kind="ACTIVATION")]):
        found = work.remote(plan, there, lost=[device_name(0)], takes_over=last)
    assert found.equals(work.inline(plan))


def test_after_a_loss_only_optimiser_state_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that lead additional blocks receive only the optimiser state of these blocks."""
    requests, wanted = list[Wanted](), loading._wanted
    monkeypatch.setattr(
        loading, "_wanted", lambda *args: requests.append(wanted(*args)) or requests[-1]
    )
    plan, first = plan_of(*PLANS["one"], m=1), Work()
    second = first.after(first.inline(plan))
    with daemons(3) as there, planted([Fault(there[1], 1, False, True, kind="BEGIN")]):
        found = second.remote(plan, there, lost=[device_name(1)])
    assert found.equals(second.inline(plan))
    assert [len(each.blocks) for each in requests] == [4, 4, 4, 0, 0]
    assert sum(len(each.states) for each in requests[3:]) in range(1, 5)
