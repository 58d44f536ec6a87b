"""A unit's devices: their reports to the server, and the state from which another process
continues."""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_cluster import SMALL, daemons, device_name, plan_of
from step_laws import law_of, taking
from torch import nn

from client_app.devices import round_pipeline
from client_app.devices.known_devices import Devices
from client_app.devices.plan_after_loss import plan_after_loss, taken_over_by
from client_app.devices.round_pipeline import DevicePipeline, RoundStart
from collapipe import __version__
from collapipe.config import load_overrides
from collapipe.devices.kept_law import pack_law, unpack_law
from collapipe.errors import InfeasibleRoundError, LinkError, RoundFailedError, WireError
from collapipe.models.frozen import FrozenParts
from collapipe.models.part import Part
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.process.host import Host, this_host
from collapipe.state import AffineLaw, DeviceProfile, MemoryBudget, SharingLaw
from collapipe.step_law import HeldStage, MeasuredPlan, StepLaw
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.messages import TrainRequest
from optim.problem import ClusterProblem
from optim.step import in_flight
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.control_unit.step_times import StepTimes
from pipeline.devices.messages import BRIEF
from tests.optim.sharing.oracle import fits, fits_alone, times
from tests.thorough import cases


def devices(profile: bool | None = None, running: Sequence[DeviceAddress] = ()) -> Devices:
    """Return two devices that no process has contacted yet, or these ``running`` ones."""
    roster = running or [DeviceAddress(name, f"{name}.home:7700") for name in ("jetson", "pi")]
    cluster: Any = SimpleNamespace(roster=lambda unit: roster, credentials=None)
    pipeline = SimpleNamespace(profile=profile, relay=False)
    settings: Any = SimpleNamespace(pipeline=pipeline, batch_size=8)
    return Devices(settings, cluster, 0)


def never() -> StepLaw:
    raise AssertionError("a law is known")


def learn(
    own: Devices, pi_s: float, send_s: float = 0.0, machines: tuple[str, str] = ("j", "p")
) -> None:
    """Learn from a round of one block on each device, planned with 1 s per block; the Jetson takes
    4 s."""
    plan = plan_of(["jetson", "pi"], [1, 1])
    times = StepTimes(
        forward_s=(1.0, pi_s / 4),
        backward_s=(3.0, pi_s * 3 / 4),
        send_s={"jetson": 0.0, "pi": send_s, None: 0.0},
        embedding_forward_s=0.0,
        embedding_backward_s=0.0,
        submit_s=0.0,
        head_s=0.0,
        head_pace_s=0.0,
        overhead_s=0.0,
        step_s=12.0,
    )
    known = taking({"jetson": 1.0, "pi": 1.0})
    hosts = {name: Host(each, 4) for name, each in zip(known, machines, strict=True)}
    own.learn(plan, times, hosts, known.values())


def slowness(own: Devices) -> dict[str, float]:
    """Return the slowness of each measured device."""
    return {name: each.slowness for name, each in own.law.devices.items()} if own.law else {}


def test_another_process_plans_like_the_previous_one() -> None:
    first, second = devices(), devices()
    learn(first, pi_s=2.0)
    assert slowness(first) == pytest.approx({"jetson": 4.0, "pi": 2.0})
    assert first.law is not None and first.law.blocks == {"jetson": 1, "pi": 1}
    second.recall(first.kept(), never)
    assert second.law == first.law
    described = DeviceProfile("pi", AffineLaw(1.0, 2.0, 3.0, 4.0))
    stranger = DeviceProfile("nano", AffineLaw(1.0, 2.0, 3.0, 4.0))
    measured = replace(described, time=AffineLaw(2.0, 4.0, 3.0, 4.0))
    as_usual = replace(stranger, time=stranger.time.taking(8**0.5))  # the mean of 4 and 2
    known, expected = second.known([described, stranger]), (measured, as_usual)
    assert [each.name for each in known] == ["pi", "nano"]
    times = [astuple(each.time) for each in known]
    assert times == [pytest.approx(astuple(each.time)) for each in expected]
    second.recall({}, lambda: None)
    assert second.law is None and second.known([described]) == (described,)


def test_a_device_with_another_version_holds_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with daemons(1) as (daemon,):
        device = DeviceAddress(device_name(0), daemon.address)
        own, described = devices(running=[device]), [*taking({device.name: 1.0}).values()]
        assert own.present(described)[0].max_blocks is None
        assert ask_status(own._dialer, device, BRIEF).flops_per_s is None
        monkeypatch.setattr("client_app.devices.known_devices.__version__", "9.9.9")
        assert own.present(described)[0].max_blocks == 0
        other = devices(running=[DeviceAddress("other", daemon.address)])
        assert other.present([replace(described[0], name="other")])[0].max_blocks == 0
        assert f"its address belongs to {device.name}" in other.absent["other"]
    assert own.news == [
        f"planned without {device.name}: has CollaPipe {__version__}, here is 9.9.9; install "
        "the same version"
    ]


def test_each_kind_of_cause_of_an_absence_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, known = devices(), [*taking({"jetson": 1.0, "pi": 1.0}).values()]
    refused, strange = "pi: Connection refused", "its address belongs to zero"
    whys = refused, refused, "pi: timed out after 3 s", "pi: timed out after 4 s", refused, strange
    for why in (*whys, None, refused):
        monkeypatch.setattr(own, "_fault", {"jetson": None, "pi": why}.get)
        own.present(known)
    reported = [f"planned without pi: {why}" for why in (refused, whys[2], strange)]
    assert own.news == [*reported, "pi answers again", reported[0]]


def test_a_machine_keeps_its_label_in_another_process() -> None:
    """This does not depend on which of its devices answers first."""
    first, second = devices(), devices()
    learn(first, pi_s=2.0, machines=("a", "a"))
    assert first.law is not None
    assert {each.host for each in first.law.devices.values()} == {"jetson"}
    second.recall(first.kept(), never)
    labelled = second._labelled({"new": Host("c", 1), "pi": Host("a", 4)})
    assert (labelled["pi"].name, labelled["new"].name, labelled[None].name) == ("jetson", "new", "")


def test_a_machine_keeps_its_label_in_a_round_of_other_devices() -> None:
    own = devices()
    for name in ("jetson", "pi"):
        assert own._labelled({name: Host("a", 4)})[name].name == "jetson"


def test_devices_that_moved_apart_get_different_labels() -> None:
    own = devices()
    for machines in (("a", "a"), ("b", "a"), (this_host().name, "a"), ("b", "a")):
        learn(own, pi_s=2.0, machines=machines)
        assert own.law is not None
        labels = [own.law.devices[name].host for name in ("jetson", "pi")]
        assert (labels[0] == labels[1]) == (machines[0] == machines[1])
        assert (labels[0] == "") == (machines[0] == this_host().name)


def test_impossible_times_of_a_device_are_not_used() -> None:
    own = devices()
    learn(own, pi_s=2.0)
    before = own.law
    learn(own, pi_s=8.0, send_s=1e9)
    assert own.law == before


def test_a_busy_round_moves_an_estimate_by_half() -> None:
    own = devices()
    for pi_s in (1.0, 4.0, 1.0, 1.0):
        learn(own, pi_s)
    assert slowness(own)["jetson"] == pytest.approx(4.0)
    assert slowness(own)["pi"] == pytest.approx(4.0**0.125)


def test_without_profiling_laws_are_never_changed() -> None:
    own, other = devices(profile=False), devices()
    learn(own, pi_s=2.0)
    learn(other, pi_s=2.0)
    own.recall(other.kept(), never)
    assert own.law is None


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.0},
        {"head_s": 1e-30},
        {"spread": -1.0},
        {"head_s": 1e300},
        {"head_s": 1.0, "launch": {"head_s": 1e-30}},
        {"head_s": 1.0, "launch": {"head_s": 2.0}},
        {"num_micro_batches": 10**9},
        {"host": "other"},
        {"stages": [{"devices": ["\x1b"], "blocks": 1}]},
        {"stages": [{"devices": ["x" * 65], "blocks": 1}]},
        {"stages": [{"devices": ["pi"], "blocks": 0}]},
        {"stages": [{"devices": ["pi"], "blocks": 1}] * 2},
        {"stages": [{"devices": ["pi", "jetson"], "blocks": 1}]},
        {"stages": [{"devices": ["pi", "jetson"], "blocks": 1, "rows": [1]}]},
        {"stages": [{"devices": ["pi", "jetson"], "blocks": 1, "rows": [1, 0]}]},
        {"stages": [{"devices": [], "blocks": 1}]},
        {"sync_slowness": 0.0},
        *({"launch": {"head_s": each}} for each in (1e4, -1.0, 1e-30, math.nan)),
        {"spread_of_new": -1.0},
        *(
            {"measured": [{"stages": [], "num_micro_batches": 1, "step_s": 1.0} | each] * count}
            for count, each in (
                (5, {}),
                (1, {"step_s": 0.0}),
                (1, {"weight": 1.5}),
                (1, {"num_micro_batches": 0}),
                (1, {"stages": [{"devices": ["x" * 65], "blocks": 1}]}),
                (1, {"stages": [{"devices": ["pi"], "blocks": 0}]}),
            )
        ),
        {"cores": {}},
        {"cores": {"": 4, "jetson": 4, "pi": 10**9}},
        {
            "devices": {
                str(k): {"forward_share": 0.5, "send_s": 0, "host": "jetson"} for k in range(129)
            }
        },
        *(
            {"devices": {"pi": {"forward_share": 0.5, "send_s": 0, "host": "pi", "slowness": each}}}
            for each in (0.0, -1.0, 1e9, math.nan)
        ),
    ],
    ids=str,
)
def test_an_impossible_law_is_refused(change: dict[str, Any]) -> None:
    own = devices()
    learn(own, pi_s=2.0)
    law = own.kept()["step_law"]["law"]
    content = json.loads(law.numpy().tobytes()) | change
    bad = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    with pytest.raises(WireError, match="law of a step"):
        own.recall({"step_law": {"law": bad}}, never)
    for invalid in ({"law": law.float()}, {"law": law, "more": law}, {"other": law}):
        with pytest.raises(WireError, match="law of a step"):
            own.recall({"step_law": invalid}, never)


def test_the_largest_law_can_be_kept() -> None:
    names = [f"{number:03}{'ö' * 61}" for number in range(128)]
    law = law_of(names, apart=True, blocks=dict.fromkeys(names, 4096), send_s=1 / 3e9)
    plans = tuple(
        MeasuredPlan(law.stages, m, 1 / 3e9, "one_f_one_b", 1 / 3) for m in (1000, 2000, 3000, 4000)
    )
    law = replace(law, measured=plans)
    assert unpack_law(pack_law(law)) == law


def pipeline_of(own: Devices, plan: ClusterPlan) -> Any:
    """Return a round's pipeline with three devices."""
    sections: Any = {"pipeline": SimpleNamespace(num_segments=None), "tree": {"strategy": {}}}
    return SimpleNamespace(
        _all=own,
        _plan=plan,
        _devices=taking(dict.fromkeys(("jetson", "pi", "zero"), 1.0)),
        _settings=SimpleNamespace(batch_size=8, **sections),
        _enough=350.0,
    )


def held(plan: ClusterPlan) -> dict[str, int]:
    return {each.device: each.span.blocks for each in plan.segments}


SCARCE = "2 blocks need 400 bytes, this device offers 300"
LEAST = f"{SCARCE}; 350 are enough for 1 block"


def test_a_device_that_refused_blocks_is_never_asked_for_as_many_again() -> None:
    """It keeps fewer in the same round, after a later loss, and if the server plans it as before.
    The user learns of it once."""
    own, plan = devices(), plan_of(["jetson", "pi"], [2, 2])
    for lost in ({}, {"zero": "Socket closed"}):
        for refused in ({"pi": (2, SCARCE)}, {}):
            found = DevicePipeline._replan(pipeline_of(own, plan), lost, refused)
            assert found.devices and held(found).get("pi", 0) <= 1
    assert own.news == [f"pi holds at most 1 block from now on: {LEAST}"]
    DevicePipeline._replan(pipeline_of(own, plan), {}, {"pi": (1, SCARCE)})
    assert own.limits["pi"] == (0, SCARCE)


def test_an_error_names_why_devices_hold_too_little() -> None:
    own, plan = devices(), plan_of(["jetson", "pi"], [2, 2])
    left = pipeline_of(own, plan)
    left._devices = {name: each.at_most(2) for name, each in left._devices.items()}
    lost = {"zero": "UNAVAILABLE: ipv4:10.0.0.5:7700: Socket closed"}
    with pytest.raises(RoundFailedError, match="at most 3 of 4 blocks") as failed:
        DevicePipeline._replan(left, lost, {"pi": (2, SCARCE)})
    assert f"pi ({LEAST})" in str(failed.value) and "zero (UNAVAILABLE" in str(failed.value)
    assert "10.0.0.5" not in str(failed.value)


def test_a_limit_ends_when_its_device_returns_or_offers_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, known = devices(), [*taking({"jetson": 1.0, "pi": 1.0}).values()]
    offered: dict[str, float] = {"jetson": 9e9, "pi": 300.0}

    def status(dialer: object, device: DeviceAddress, request: bytes) -> Any:
        if device.name not in offered:
            raise LinkError(f"device {device.name}: Connection refused")
        memory = offered[device.name]
        return SimpleNamespace(memory_bytes=memory, misfit=lambda *_: None)

    def most(alive: Collection[str] = ()) -> list[int | None]:
        return [each.max_blocks for each in own.present(known, alive)]

    monkeypatch.setattr("client_app.devices.known_devices.Dialer.fault", lambda *_: None)
    monkeypatch.setattr("client_app.devices.known_devices.ask_status", status)
    assert most() == [None, None]
    own.limit("pi", 1, SCARCE)
    for memory, blocks in ((200.0, 1), (200.0, 1), (300.0, None)):  # restarted with less before
        offered["pi"] = memory
        assert most(alive=["jetson", "pi"]) == [None, blocks]
    own.limit("pi", 1, SCARCE)
    memory = offered.pop("pi")
    assert most() == [None, 0]
    offered["pi"] = memory
    assert most() == [None, None]


def test_the_error_of_a_unit_without_devices_has_no_address() -> None:
    own = pipeline_of(devices(), plan_of(["jetson"], [2]))
    own._devices, own._all.absent = {}, {"pi": "device pi at pi.home:7700: timed out"}
    with pytest.raises(RoundFailedError, match="jetson") as failed:
        lost = {"jetson": "UNAVAILABLE: ipv4:10.0.0.5:7700: Socket closed"}
        DevicePipeline._replan(own, lost, {})
    assert "timed out" in str(failed.value)
    assert not any(each in str(failed.value) for each in ("pi.home", "10.0.0.5", "7700"))


def taking_over(plan: ClusterPlan, lost: str, closed: str = "", **memory: float) -> ClusterPlan:
    """Return the plan after the loss of ``lost``. Boxes a to d are each slower than the one before;
    a block needs 1 B of ``memory``. ``closed`` boxes hold at most one block."""
    boxes = {
        name: DeviceProfile(
            name,
            AffineLaw(float(k), 0.0, 0.0, 0.0),
            max_blocks=1 if name in closed else None,
            memory=MemoryBudget(memory.get(name, 9.0), 0.0, 1.0, 0.0),
            sharing=SharingLaw(0.0),
        )
        for k, name in enumerate("abcd", 1)
    }
    return after_loss(plan, boxes, lost)


def after_loss(plan: ClusterPlan, boxes: dict[str, DeviceProfile], lost: str) -> ClusterPlan | None:
    left = [each for name, each in boxes.items() if name != lost]
    return taken_over_by(plan, {lost}, left, batch_size=4 * plan.num_micro_batches)


HALVES = Share("a", 2), Share("b", 2)
Held = tuple[dict[str, int], int, set[str]]  # a stage's rows by device, blocks, recomputing devices


def drawn_loss(rng: np.random.Generator) -> tuple[list[Held], dict[str, DeviceProfile]]:
    """Draw stages in random order: the lost device x, devices with shares, and perhaps one more.
    Other devices are free. Memory is enough for some of them, with or without recomputing."""
    boxes = {}
    for name in "abcdsx":
        of_batch, limit = float(rng.uniform(1, 4)), float(rng.uniform(3, 14))
        memory, smaller = (MemoryBudget(limit, 0.0, 1 + b, 0.0, 0.0, b) for b in (of_batch, 0.2))
        law = AffineLaw(float(rng.uniform(0.1, 1)), 0.1, 0.0, 0.1)
        box = DeviceProfile(name, law, memory=memory, sharing=SharingLaw(0.0, memory=memory))
        may = box.or_recomputing(4 / 3, replace(box, memory=smaller))
        boxes[name] = may if rng.random() < 0.8 else box
    shared = [{"a": 2, "b": 2}, {"a": 1, "b": 1, "c": 2}][rng.integers(2)]
    every = [{"x": 4}, shared, {"d": 4}][: rng.integers(2, 4)]
    stages = []
    for k in rng.permutation(len(every)):
        on = {name for name in every[k] if rng.random() < 0.4 and boxes[name].recomputing}
        stages.append((every[k], int(rng.integers(1, 3)), on))
    return stages, boxes


def heirs_of(stages: list[Held]) -> Iterator[list[Held]]:
    """Yield all ways to continue without x. A free device takes its blocks, or the only device of a
    neighbouring stage does. Or a device with shares takes them; its rows then go to the nearest
    device of its stage."""
    place = next(k for k, (rows, _, _) in enumerate(stages) if "x" in rows)
    _, blocks, on = stages[place]
    for k, (rows, own, recomputing) in enumerate(stages):
        names = [*rows]
        for name in names if len(rows) > 1 else ():
            at = names.index(name)
            heir, left = names[at - 1 if at else 1], dict(rows)
            left[heir] += left.pop(name)
            changed = {
                place: ({name: 4}, blocks, on and {name}),
                k: (left, own, recomputing and {*left}),
            }
            yield [changed.get(n, each) for n, each in enumerate(stages)]
        if abs(k - place) == 1 and len(rows) == 1:
            both = rows, own + blocks, {*rows} if on or recomputing else set()
            yield [*stages[: min(k, place)], both, *stages[max(k, place) + 1 :]]
    for name in {*"abcds"} - {name for rows, _, _ in stages for name in rows}:
        yield [*stages[:place], ({name: 4}, blocks, on and {name}), *stages[place + 1 :]]


def batch_of(stages: list[Held], boxes: dict[str, DeviceProfile], schedule: str) -> float:
    """Return the seconds of a batch in two micro-batches; infinite if a device cannot hold its
    part."""
    left = tuple(each for name, each in boxes.items() if name != "x")
    total = sum(blocks for _, blocks, _ in stages)
    problem = ClusterProblem(left, total, 8, 2, "overlap", in_flight=in_flight(schedule, len(left)))
    paces, sums = [], []
    for place, (rows, blocks, on) in zip(range(len(stages), 0, -1), stages, strict=True):
        own = [boxes[name].in_mode(name in on) for name in rows]
        if len(own) == 1:
            held = [fits_alone(problem, own[0], blocks, 2, place)]
        else:
            pairs = zip(own, rows.values(), strict=True)
            held = [fits(problem, each, blocks, y, 2, len(own), place) for each, y in pairs]
        pace, once = times(problem, own, [*rows.values()], blocks)
        paces.append(pace if all(held) else math.inf)
        sums.append(once)
    return sum(sums) + max(paces)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_no_other_device_can_take_over_faster(schedule: str) -> None:
    """In each way to continue, a device that takes over recomputed blocks recomputes them, too."""
    found, recomputed = 0, 0
    for number in range(cases(few=100, many=3000)):
        stages, boxes = drawn_loss(np.random.default_rng(number))
        segments, first = list[SegmentPlan](), 0
        for rows, blocks, on in stages:
            shares = tuple(Share(*each) for each in rows.items()) if len(rows) > 1 else ()
            names = tuple(name for name in rows if name in on)
            segments.append(SegmentPlan(next(iter(rows)), Span(first, blocks), shares, names))
            first += blocks
        plan = ClusterPlan(0, tuple(segments), 2, schedule)
        every = [batch_of(each, boxes, schedule) for each in heirs_of(stages)]
        if math.isinf(min(every)):
            assert after_loss(plan, boxes, "x") is None
            continue
        taken = after_loss(plan, boxes, "x")
        held = [
            (
                dict(zip(e.devices, e.rows_of_devices or (4,), strict=True)),
                e.span.blocks,
                {*e.recomputing},
            )
            for e in taken.segments
        ]
        assert batch_of(held, boxes, schedule) == pytest.approx(min(every)), number
        found, recomputed = found + 1, recomputed + any(on for _, _, on in held)
    assert found > 20 and recomputed > 10


def test_a_lost_segment_moves_to_the_device_with_which_the_plan_is_fastest() -> None:
    """Memory or an owner's limit can exclude a device."""
    pair = SegmentPlan("b", Span(3, 1), (Share("b", 2), Share("c", 2)))
    plan = ClusterPlan(0, (SegmentPlan("a", Span(0, 3)), pair), 1, "gpipe")
    assert taking_over(plan, "a").segments[0].device == "b"
    assert taking_over(plan, "a", b=2.0).segments[0].device == "c"
    assert taking_over(plan, "a", b=2.0, c=2.0).segments[0].device == "d"
    assert taking_over(plan, "a", closed="b", c=2.0).segments[0].device == "d"
    assert taking_over(plan, "a", closed="bcd") is None


def test_a_lost_segment_is_planned_anew_if_no_device_can_take_it_over() -> None:
    """A device cannot hold shares in addition to another segment, or more shares than its memory
    allows."""
    halves = SegmentPlan("a", Span(0, 2), (Share("a", 1), Share("a", 1)))
    plan = ClusterPlan(0, (halves, SegmentPlan("b", Span(2, 2))), 1, "gpipe")
    assert taken_over_by(plan, {"a"}, [], batch_size=4) is None
    law, whole = AffineLaw(1.0, 0.0, 0.0, 0.0), SegmentPlan("a", Span(0, 4), HALVES)
    for limit, m in ((55.0, None), (56.0, 1)):
        memory = MemoryBudget(limit, 0.0, 10.0, 0.0, trained_bytes=4.0)
        boxes = {name: DeviceProfile(name, law, memory=memory) for name in "ab"}
        plan = ClusterPlan(0, (whole,), 1, "gpipe")
        taken = after_loss(plan, boxes, "a")
        assert (taken and taken.num_micro_batches) == m
        assert after_loss(replace(plan, over_limits=True), boxes, "a")
    thirds = SegmentPlan("a", Span(0, 4), (Share("a", 2), Share("b", 1), Share("c", 1)))
    boxes = {name: DeviceProfile(name, law) for name in "abc"}  # as in VanillaFL
    assert after_loss(ClusterPlan(0, (thirds,), 1, "gpipe"), boxes, "a")


def test_a_loss_that_changes_bits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other device can hold the lost segment in addition to its shares."""
    shared = SegmentPlan("b", Span(1, 3), (Share("b", 2), Share("c", 2)))
    plan = ClusterPlan(0, (SegmentPlan("a", Span(0, 1)), shared), 1, "gpipe")
    law = AffineLaw(1.0, 0.0, 0.0, 0.0)
    left = [DeviceProfile(name, law, max_blocks=3) for name in "bc"]
    monkeypatch.setattr("client_app.devices.plan_after_loss.taken_over_by", lambda *_: None)
    found, news = plan_after_loss(plan, {"a"}, left, 4, most_segments=None, may_share=False)
    assert not found.shares and {*found.devices} == {"b", "c"}
    assert news == (
        "without a no devices can hold the shares: blocks are planned anew, which changes the "
        "weights' last bits"
    )


@pytest.mark.parametrize("may_share", [True, False])
def test_after_a_loss_devices_share_blocks_that_no_pipeline_can_hold(may_share: bool) -> None:
    """Two devices have memory for half of the rows of the only block."""
    memory = MemoryBudget(4.0, 0.0, 0.1, 1.0)
    law, shared = AffineLaw(1.0, 0.0, 0.0, 0.0), SharingLaw(0.0, memory=memory)
    plan = ClusterPlan(0, (SegmentPlan("a", Span(0, 1)),), 1, "gpipe")
    left = [DeviceProfile(name, law, memory=memory, sharing=shared) for name in "bc"]
    if not may_share:
        with pytest.raises(InfeasibleRoundError, match="the devices hold at most 0 of 1"):
            plan_after_loss(plan, {"a"}, left, 4, most_segments=None, may_share=False)
        return
    found, news = plan_after_loss(plan, {"a"}, left, 4, most_segments=None, may_share=True)
    (segment,) = found.segments
    assert {each.device: each.rows for each in segment.shares} == {"b": 2, "c": 2}
    assert news == (
        "without a no devices can hold the blocks without sharing them: blocks are planned anew, "
        "which changes the weights' last bits"
    )


@pytest.mark.parametrize("sharing", ["auto", "never"])
def test_a_round_plans_by_the_strategy_after_a_loss_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, sharing: str
) -> None:
    """The round's cluster plans the rest of the round; ``Devices`` keeps the message."""
    settings = load_overrides([f"strategy.sharing={sharing}", "batch_size=4", "model.num_blocks=1"])
    memory = MemoryBudget(4.0, 0.0, 0.1, 1.0)
    law, shared = AffineLaw(1.0, 0.0, 0.0, 0.0), SharingLaw(0.0, memory=memory)
    roster = [DeviceAddress(name, f"{name}.home:7700") for name in "abc"]
    cluster: Any = SimpleNamespace(roster=lambda unit: roster, credentials=None)
    known = Devices(settings, cluster, 0)
    monkeypatch.setattr(round_pipeline, "RemoteSegments", lambda plan, cluster, *_: cluster)
    round_: Any = DevicePipeline(
        settings=settings,
        devices=known,
        described=[DeviceProfile(name, law, memory=memory, sharing=shared) for name in "abc"],
        request=TrainRequest(1, plan_of(["a"], [1], 1), 60.0, None),
        spec=SMALL,
        start=RoundStart({}, FrozenParts({}, SMALL, Vocabulary(9, 0, 1, 2), torch.float32, []), {}),
        embedding=Part("embedding", nn.Identity(), settings.optimizer),
    )
    if sharing == "never":
        with pytest.raises(
            RoundFailedError, match=r"^because of a \(ended\): the devices hold at most 0"
        ):
            round_.segments.replan({"a": "ended"}, {})
        return
    (segment,) = round_.segments.replan({"a": "ended"}, {}).segments
    assert {each.device: each.rows for each in segment.shares} == {"b": 2, "c": 2}
    (message,) = known.news
    assert message.startswith("without a no devices can hold the blocks")


def _settings(split: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(batch_size=8, framework=SimpleNamespace(partition=split))


@pytest.mark.parametrize(("split", "rule"), [(None, ""), ("titanic", " by the rule of titanic")])
def test_moved_blocks_are_reported_with_the_rule_of_a_framework(
    split: str | None, rule: str
) -> None:
    """A framework's rule may move blocks to devices with which a step is slower."""
    own = devices()
    learn(own, pi_s=100.0)
    own.advised, plan = True, plan_of(["jetson"], [2])
    known = taking({"jetson": 1.0, "pi": 1.0})
    pipeline: Any = SimpleNamespace(
        _all=own, _plan=plan, _devices=known, _settings=_settings(split)
    )
    moved, _ = DevicePipeline._planned(pipeline)
    assert moved.startswith(f"blocks are now 2 jetson instead of 1 jetson + 1 pi{rule}: measured")


def test_a_device_left_without_blocks_is_reported_once_and_again_on_return() -> None:
    """The inventory describes 1 s per block; a block took 4 s on the Jetson and 100 s on the Pi."""
    own, settings = devices(), _settings()
    learn(own, pi_s=100.0)
    own.advised = True
    law, known = own.law, taking({"jetson": 1.0, "pi": 1.0})
    assert law is not None

    def reports(names: list[str]) -> list[str]:
        plan = plan_of(names, [2] if len(names) == 1 else [1, 1])
        pipeline: Any = SimpleNamespace(_all=own, _plan=plan, _devices=known, _settings=settings)
        return [*DevicePipeline._planned(pipeline)][1:]  # without the report of blocks

    (left,) = reports(["jetson"])
    assert left.startswith("pi holds no block") and "100 times" in left and "usual: 20" in left
    own.law = replace(law, stages=(HeldStage(("jetson",), 2),))
    assert reports(["jetson"]) == []
    (back,) = reports(["jetson", "pi"])
    assert back == "pi holds blocks again"


def test_one_process_is_advised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, plan = devices(), plan_of(["jetson", "pi"], [1, 1])
    learn(own, pi_s=2.0)
    monkeypatch.setattr(
        "client_app.devices.round_pipeline.without_devices", lambda *_: "devices share a machine"
    )
    known, settings = taking({"jetson": 1.0, "pi": 1.0}), _settings()
    pipeline: Any = SimpleNamespace(_all=own, _plan=plan, _devices=known, _settings=settings)
    reports = [[*DevicePipeline._planned(pipeline)] for _ in range(2)]
    assert reports == [["devices share a machine"], []]
