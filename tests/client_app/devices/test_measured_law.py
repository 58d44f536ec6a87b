"""The law of a step is fitted to measured steps; here a known law simulates the steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import pytest
import torch
from step_laws import law_of, stages_of, taking, works_with

from client_app.devices.law_of_rounds import (
    fitted_to_last,
    launch_times,
    updated,
    with_other_size,
)
from client_app.devices.measured_law import held_stages, known_profile, measured_law
from client_app.devices.plan_news import without_devices
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.process.host import Host
from collapipe.state import AffineLaw, DeviceProfile, Link, SharingLaw
from collapipe.step_law import (
    MOST_SLOWNESS,
    OWN_TIMES,
    DeviceTimes,
    HeldStage,
    LaunchTimes,
    MeasuredPlan,
    StepLaw,
)
from optim.jobs import Key
from optim.step import play, step_s, works_of
from pipeline.devices.control_unit.measurements import Clock, Measurements
from pipeline.devices.control_unit.own_times import OwnTimes
from pipeline.schedule import FORWARD, Action, build, embedding

NAMES = ["a", "b", "c"]
BLOCK_S = {"a": 0.02, "b": 0.01, "c": 0.03}
AHEAD_S = {"a": 7.0, "b": -3.0, "c": 0.5}  # offsets of the devices' clocks
USAGE = torch.zeros(2, dtype=torch.float64)


def plan_of(blocks: Mapping[str, int], m: int) -> ClusterPlan:
    segments, first = [], 0
    for name, count in blocks.items():
        segments.append(SegmentPlan(name, Span(first, count)))
        first += count
    return ClusterPlan(0, tuple(segments), m, "one_f_one_b")


def real_law(cores: int, apart: bool) -> StepLaw:
    """Return a law in which everything takes time."""
    return law_of(
        NAMES,
        apart=apart,
        cores=cores,
        embedding_forward_s=0.003,
        embedding_backward_s=0.002,
        submit_s=0.001,
        send_s=0.004,
        head_s=0.05,
        head_pace_s=0.03,
        overhead_s=0.006,
    )


SIZE = 24  # samples per batch
ROWS_S = {"a": 0.002, "b": 0.001, "c": 0.003}  # per block and row
LAUNCH_S = 0.004
SYNC_S = 0.01
SHARES = (SegmentPlan("a", Span(0, 6), (Share("a", 2), Share("b", 3), Share("c", 1))),)
MIXED = SegmentPlan("a", Span(0, 2)), SegmentPlan("b", Span(2, 4), (Share("b", 3), Share("c", 3)))


def truth_of(launch_s: float = LAUNCH_S) -> dict[str, DeviceProfile]:
    """Return devices whose seconds depend on rows, and that add gradients."""
    return {
        name: DeviceProfile(name, AffineLaw(u, launch_s, 0.0, 0.0), sharing=SharingLaw(SYNC_S))
        for name, u in ROWS_S.items()
    }


def run(
    law: StepLaw, plan: ClusterPlan, devices: Mapping[str, DeviceProfile], steps: int = 3
) -> Measurements:
    """Simulate steps as devices and the control unit measure them; the first one takes twice as
    long."""
    held = [(k, name) for k, each in enumerate(plan.segments) for name in each.devices]
    works, m = works_of(law, held_stages(plan), devices, SIZE), plan.num_micro_batches
    ran, lists = play(law, works, plan.schedule), build(plan.schedule, len(plan.segments), m)
    measured = Measurements()
    for number in range(steps):
        base_s, stretch = 100.0 * number, 1 if number else 2
        now = {key: (base_s + t[0] * stretch, base_s + t[1] * stretch) for key, t in ran.items()}
        for place, (stage, name) in enumerate(held):
            free_s, rows = base_s, []
            for action, (began_s, ended_s) in times(now, place, lists[stage]).items():
                sends = stage or action.kind == FORWARD or law.embedding_backward_s
                rows.append([free_s, began_s, ended_s, ended_s + (1e-6 if sends else 0)])
                free_s = ended_s
            table = torch.tensor(rows, dtype=torch.float64) + AHEAD_S[name]
            measured.add(name, len(rows), table, USAGE)
        end_s = max(end for _, end in now.values()) + law.overhead_s
        own = embedding(plan.schedule, len(plan.segments), m)
        measured.add_own(
            OwnTimes(times(now, -1, own), times(now, len(held), lists[-1]), base_s, end_s)
        )
    return measured


def times(
    ran: Mapping[Key, tuple[float, float]], stage: int, actions: Sequence[Action]
) -> dict[Action, tuple[float, float]]:
    """Return the start and end of each action of a stage."""
    return {each: ran[stage, each.kind, each.micro_batch] for each in actions}


def fitted(
    law: StepLaw,
    plan: ClusterPlan,
    devices: Mapping[str, DeviceProfile],
    described: Mapping[str, DeviceProfile],
    before: StepLaw | None = None,
) -> StepLaw:
    clocks = {name: Clock(-ahead_s, 0.0) for name, ahead_s in AHEAD_S.items()}
    times = run(law, plan, devices).step_times(plan, clocks)
    assert times is not None
    names = {None: law.host} | {name: each.host for name, each in law.devices.items()}
    hosts = {name: Host(host, law.cores[host]) for name, host in names.items()}
    return measured_law(plan, times, hosts, described, SIZE, before)


HALF = taking(dict.fromkeys(NAMES, 0.5))


def planned_s(
    law: StepLaw, devices: Mapping[str, DeviceProfile], segments: Sequence[SegmentPlan]
) -> float:
    """Return the seconds of a step that the law predicts for these segments."""
    stages = held_stages(ClusterPlan(0, tuple(segments), 4, "one_f_one_b"))
    return step_s(law, works_of(law, stages, devices, SIZE), "one_f_one_b")


def known(described: Mapping[str, DeviceProfile], law: StepLaw) -> dict[str, DeviceProfile]:
    """Return the devices with their measured speeds."""
    return {name: known_profile(each, law, SIZE) for name, each in described.items()}


@pytest.mark.parametrize(("cores", "apart"), [(64, True), (64, False), (2, False), (1, False)])
def test_a_fitted_law_predicts_the_steps_that_it_was_fitted_to_and_other_cuts(
    cores: int, apart: bool
) -> None:
    law, plan = real_law(cores, apart), plan_of({"a": 2, "b": 2, "c": 2}, 4)
    found = fitted(law, plan, truth := taking(BLOCK_S), HALF)
    mean_s = (4 / 3) * (planned_s(law, truth, plan.segments) - law.overhead_s) + law.overhead_s
    devices = known(HALF, found)
    assert planned_s(found, devices, plan.segments) == pytest.approx(
        mean_s
    )  # the first step counts
    unlike = replace(found, factor=1.0)
    for cut in ({"a": 3, "b": 3}, {"a": 1, "b": 4, "c": 1}, {"b": 6}):
        segments = plan_of(cut, 4).segments
        expected_s = planned_s(law, truth, segments)
        assert planned_s(unlike, devices, segments) == pytest.approx(
            expected_s, rel=0.01 if cores == 64 else 0.15
        )


def test_a_law_of_a_slow_link_predicts_orders_without_it() -> None:
    """It also predicts orders with other links. The inventory has the links' ratio, but no hop's
    seconds."""
    law, links = real_law(64, True), {"ab": 20.0, "bc": 3.0}
    truth = {
        name: replace(
            each,
            time=replace(each.time, ell=1.0),
            links=tuple(
                Link(other, 0.0, ratio)
                for pair, ratio in links.items()
                for other in pair.replace(name, "")
                if name in pair
            ),
        )
        for name, each in taking(BLOCK_S).items()
    }
    measured = plan_of({"a": 2, "b": 2, "c": 2}, 4)
    found = replace(fitted(law, measured, truth, truth), factor=1.0)
    assert found.devices["c"].send_s == pytest.approx(0.004, rel=0.01)
    for order in ("abc", "bac", "cba", "bca", "acb"):
        segments = plan_of(dict.fromkeys(order, 2), 4).segments
        expected_s = planned_s(law, truth, segments)
        assert planned_s(found, known(truth, found), segments) == pytest.approx(
            expected_s, rel=0.02
        )


@pytest.mark.parametrize("segments", [SHARES, MIXED], ids=["shared", "mixed"])
def test_equal_rounds_do_not_change_the_law(segments: Sequence[SegmentPlan]) -> None:
    """This holds even if no gradient returns to the embedding, as with LoRA, and for hops that no
    stage waits for."""
    law, truth = replace(real_law(64, True), embedding_backward_s=0.0), truth_of()
    plan, single = ClusterPlan(0, tuple(segments), 4, "one_f_one_b"), plan_of({"a": 3, "b": 3}, 4)
    found = None
    for _ in range(5):
        found = fitted(law, single, truth, truth, found)
        found = fitted(law, plan, truth, truth, found)
        sent_s = [found.devices[name].send_s for name in NAMES]
        assert sent_s == pytest.approx([0.004] * len(NAMES), rel=0.02)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("segments", [SHARES, MIXED], ids=["shared", "mixed"])
def test_a_law_of_rounds_with_and_without_shared_stages_predicts_both(
    apart: bool, segments: Sequence[SegmentPlan]
) -> None:
    """Different numbers of rows separate a launch's time from a row's time. The inventory has no
    launch time and wrong speeds."""
    law, truth = real_law(64, apart), truth_of()
    described = {
        name: replace(each, time=AffineLaw(0.001, 0.0, 0.0, 0.0)) for name, each in truth.items()
    }
    single = plan_of({"a": 2, "b": 2, "c": 2}, 4)
    first = fitted(law, single, truth, described)
    shared = ClusterPlan(0, tuple(segments), 4, "one_f_one_b")
    second = fitted(law, shared, truth, described, first)
    devices, unlike = known(described, second), replace(second, factor=1.0)
    for own in (shared.segments, single.segments, plan_of({"a": 3, "b": 3}, 4).segments):
        assert planned_s(unlike, devices, own) == pytest.approx(
            planned_s(law, truth, own), rel=0.05
        )
    measured = {name for each in segments for name in each.devices if each.shares}
    for name in measured:
        times = second.devices[name]
        assert times.slowness * 0.001 == pytest.approx(ROWS_S[name], rel=0.01)
        assert times.launch_s == pytest.approx(LAUNCH_S, rel=0.05)


def test_time_beyond_a_steps_actions_counts_as_adding_gradients() -> None:
    """All remaining time counts if no round had only single devices."""
    law, truth = real_law(64, True), truth_of()
    plan = ClusterPlan(0, SHARES, 4, "one_f_one_b")
    found = fitted(law, plan, truth, truth)
    expected_s, devices = planned_s(law, truth, SHARES), known(truth, found)
    assert planned_s(replace(found, factor=1.0), devices, SHARES) == pytest.approx(
        expected_s, rel=0.02
    )
    assert found.overhead_s == 0.0
    assert found.stages == (HeldStage(("a", "b", "c"), 6, (2, 3, 1)),)
    assert found.sync_slowness is not None
    shown = known_profile(truth["a"], found, SIZE).sharing
    assert shown == SharingLaw(SYNC_S * found.sync_slowness)


def test_unmeasured_adding_of_gradients_is_as_slow_as_hops() -> None:
    described = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.01, 0.0), sharing=SharingLaw(SYNC_S))
    law = replace(real_law(64, True), devices={"a": DeviceTimes(1 / 3, 0.09, "a")})
    known = known_profile(described, law, SIZE)  # six rows take 0.06 s, both ways
    assert known.sharing == SharingLaw(3 * SYNC_S)
    four = replace(law, devices={"a": DeviceTimes(1 / 3, 0.09, "a", rows=4)})
    assert known_profile(described, four, SIZE).sharing == SharingLaw(4.5 * SYNC_S)
    slow = replace(law, sync_slowness=7.0)
    assert known_profile(described, slow, SIZE).sharing == SharingLaw(7 * SYNC_S)
    links = Link("b", 0.0, 0.0, sync_s=2.0), Link("c", 0.0, 0.0)
    linked = known_profile(replace(described, links=links), slow, SIZE).links
    assert linked == (replace(links[0], sync_s=14.0), links[1])
    unknown = known_profile(replace(described, name="b"), law, SIZE)
    assert unknown == replace(described, name="b")


def test_an_unmeasured_device_is_as_slow_as_the_others() -> None:
    """The same inventory describes them. A device without blocks in later rounds approaches the
    others, too."""
    described = DeviceProfile("d", AffineLaw(0.01, 0.002, 0.03, 0.0))
    slow = {name: DeviceTimes(1 / 3, 0.004, name, slowness=k) for name, k in (("a", 2), ("b", 8))}
    stages = HeldStage(("a",), 3), HeldStage(("b",), 3)
    law = replace(real_law(64, True), stages=stages, devices=slow)
    time = known_profile(described, law, SIZE).time
    assert astuple(time) == pytest.approx((0.04, 0.008, 0.03, 0.0))
    for _ in range(40):
        only = replace(law, devices={"b": DeviceTimes(1 / 3, 0.004, "b", slowness=8.0)})
        law = updated(law, only, planned_s=1.0, step_s=1.0)
    assert [each.slowness for each in law.devices.values()] == pytest.approx([8.0, 8.0])


@pytest.mark.parametrize("slowness", [MOST_SLOWNESS, 1 / MOST_SLOWNESS])
def test_the_usual_slowness_is_within_bounds(slowness: float) -> None:
    """Although the mean of logarithms is rounded."""
    for count in range(1, 129):
        devices = {f"d{k}": DeviceTimes(1 / 3, 0.0, "a", slowness=slowness) for k in range(count)}
        stages = tuple(HeldStage((name,), 1) for name in devices)
        usual = replace(real_law(64, True), stages=stages, devices=devices).usual_slowness
        assert 1 / MOST_SLOWNESS <= usual <= MOST_SLOWNESS


def test_slightly_fewer_rows_do_not_determine_a_launch() -> None:
    """A difference between six and four rows may be noise; two rows are few enough."""
    law, truth = real_law(64, True), truth_of()
    described = {
        name: replace(each, time=AffineLaw(0.001, 0.0, 0.0, 0.0)) for name, each in truth.items()
    }
    mixed = MIXED[0], replace(MIXED[1], shares=(Share("b", 4), Share("c", 2)))
    first = fitted(law, plan_of({"a": 2, "b": 2, "c": 2}, 4), truth, described)
    second = fitted(law, ClusterPlan(0, mixed, 4, "one_f_one_b"), truth, described, first)
    assert second.devices["b"].launch_s == 0.0 < second.devices["c"].launch_s
    block_s = known(described, second)["b"].time.compute(1, 4)
    assert block_s == pytest.approx(truth["b"].time.compute(1, 4), rel=0.02)  # as measured


@pytest.mark.parametrize("rows", [(5, 1), (4, 2), (3, 3), (2, 4)])
def test_a_device_with_other_rows_is_as_slow_as_described(rows: tuple[int, int]) -> None:
    law, truth = real_law(64, True), truth_of()
    shares = tuple(map(Share, "bc", rows))
    plan = ClusterPlan(0, (MIXED[0], replace(MIXED[1], shares=shares)), 4, "one_f_one_b")
    first = fitted(law, plan_of({"a": 2, "b": 2, "c": 2}, 4), truth, truth)
    for each in fitted(law, plan, truth, truth, first).devices.values():
        assert each.slowness == pytest.approx(1.0, rel=0.02)


def test_noise_does_not_become_a_launch() -> None:
    """A device that was slower with fewer rows was busy."""
    law, truth = real_law(64, True), truth_of(launch_s=0.0)
    busy = {
        name: replace(each, time=AffineLaw(0.05, 0.0, 0.0, 0.0)) for name, each in truth.items()
    }
    first = fitted(law, plan_of({"a": 2, "b": 2, "c": 2}, 4), truth, truth)
    second = fitted(law, ClusterPlan(0, SHARES, 4, "one_f_one_b"), busy, truth, first)
    for name, each in second.devices.items():
        assert each.launch_s == 0.0
        assert each.slowness == pytest.approx(0.05 / ROWS_S[name], rel=0.02)


def test_a_law_contains_the_measured_plan_and_times() -> None:
    law, plan = real_law(64, True), plan_of({"a": 1, "b": 3, "c": 2}, 4)
    found = fitted(law, plan, taking(BLOCK_S), HALF)
    assert found.blocks == {"a": 1, "b": 3, "c": 2} and found.num_micro_batches == 4
    assert found.head_s == pytest.approx(0.05) and found.send_s == pytest.approx(0.004)
    assert found.devices["b"].forward_share == pytest.approx(1 / 3)
    assert found.devices["c"].host == "c" and found.overhead_s == pytest.approx(0.006)


def test_a_busy_round_fades() -> None:
    """Each later round halves its effect; unmeasured devices stay known."""
    quiet = replace(real_law(64, True), factor=1.0, spread=0.1)
    only = {"a": DeviceTimes(1 / 3, 0.004, "a")}
    busy = replace(quiet, factor=3.0, embedding_forward_s=0.011, devices=only)
    law = updated(quiet, busy, planned_s=1.0, step_s=3.0)
    assert law.embedding_forward_s == pytest.approx(0.007)
    assert law.devices.keys() == {*NAMES}
    assert law.spread == pytest.approx((0.5 * 0.1**2 + 0.5 * 1.0986**2) ** 0.5, rel=1e-3)
    later = updated(law, quiet, planned_s=1.0, step_s=1.0)
    assert later.embedding_forward_s == pytest.approx(0.005) and later.spread < law.spread
    other = replace(quiet, num_micro_batches=2)
    found = updated(law, other, planned_s=1.0, step_s=1.0)
    assert found.embedding_forward_s == quiet.embedding_forward_s


def test_measured_plans_are_remembered_for_some_rounds() -> None:
    law, plans = real_law(64, True), [stages_of({"a": n, "b": 6 - n}) for n in (1, 2, 3, 4, 5)]

    def after(law: StepLaw, number: int, taken_s: float, m: int = 4) -> StepLaw:
        plan = MeasuredPlan(plans[number], m, taken_s, "gpipe")
        now = replace(law, stages=plans[number], measured=(plan,), num_micro_batches=m)
        return updated(law, now, planned_s=1.0, step_s=taken_s)

    for number, taken_s, m in ((0, 9.0, 4), (0, 1.0, 4), (0, 3.0, 2), (1, 5.0, 4), (0, 3.0, 4)):
        law = after(law, number, taken_s, m)
    found = [(each.stages, each.num_micro_batches, each.step_s) for each in law.measured]
    assert found == [(plans[0], 4, 4.0), (plans[1], 4, 5.0), (plans[0], 2, 3.0)]
    assert [each.weight for each in law.measured] == pytest.approx([1.0, 0.8, 0.64])
    for number in (2, 3, 4):
        law = after(law, number, 7.0)
    assert [each.stages for each in law.measured] == [plans[n] for n in (4, 3, 2, 0)]


def test_expected_seconds_of_a_measured_plan_approach_the_measurement() -> None:
    last, other, new = (stages_of({"a": n, "b": 6 - n}) for n in (1, 2, 3))
    plans = MeasuredPlan(last, 4, 9.0, "gpipe"), MeasuredPlan(other, 4, 9.0, "gpipe", weight=0.5)
    law = replace(real_law(64, True), stages=last, measured=plans)
    assert [law.expected_s(each, 4.0, "gpipe") for each in (last, other, new)] == [4.0, 6.0, 4.0]
    assert law.with_micro_batches(2).expected_s(other, 4.0, "gpipe") == 4.0
    assert law.expected_s(other, 4.0, "one_f_one_b") == 4.0
    assert law.expected_s(other, 0.0, "gpipe") == 0.0


def test_only_rounds_with_new_plans_increase_the_spread_of_new_plans() -> None:
    law, known = real_law(64, True), stages_of({"a": 1, "b": 5})
    law = replace(law, measured=(MeasuredPlan(known, 4, 1.0, "one_f_one_b"),), spread_of_new=0.4)
    same, new = law, MeasuredPlan(stages_of({"a": 6}), 4, 1.0, "one_f_one_b")
    assert updated(law, same, planned_s=1.0, step_s=9.0).spread_of_new == pytest.approx(0.38)
    for plan in (new, MeasuredPlan(known, 4, 1.0, "gpipe")):
        other = replace(law, measured=(plan,))
        found = updated(law, other, planned_s=1.0, step_s=math.e).spread_of_new
        assert found == pytest.approx(math.sqrt((0.4**2 + 1) / 2))
    for _ in range(99):
        law = updated(law, same, planned_s=1.0, step_s=1.0)
    assert law.spread_of_new == 0.02


@pytest.mark.parametrize("measured_s", [0.5, 1e-9, 1e9])
def test_the_law_explains_the_last_plan(measured_s: float) -> None:
    """Within the factor's bounds."""
    law, plan = real_law(64, True), plan_of({"a": 1, "b": 3, "c": 2}, 4)
    found = fitted(law, plan, taking(BLOCK_S), HALF)
    measured = (replace(found.measured[0], step_s=measured_s),)
    found = replace(found, measured=measured, factor=2.0)
    devices = known(taking(BLOCK_S), found)
    explains = fitted_to_last(found, devices, SIZE, plan.schedule)
    works = works_of(explains, explains.stages, devices, SIZE)
    found_s = step_s(explains, works, plan.schedule)
    assert found_s == pytest.approx(measured_s) or explains.factor in (1e-6, 1e6)


def test_a_step_of_zero_seconds_has_a_valid_law() -> None:
    """Devices may report zeros."""
    plan = MeasuredPlan(stages_of({"a": 6}), 4, 1.0, "one_f_one_b")
    law = law_of(["a"], apart=True, blocks={"a": 6}, measured=(plan,))
    assert fitted_to_last(law, taking({"a": 0.0}), SIZE, "gpipe").factor == 1e-6


def test_a_devices_slow_round_fades_without_further_measurements() -> None:
    quiet = real_law(64, True)
    slow = replace(quiet, devices={"a": DeviceTimes(1 / 3, 0.004, "a", slowness=4.0)})
    other, seen = replace(quiet, devices={"b": DeviceTimes(1 / 3, 0.004, "b")}), [4.0]
    law = slow
    while seen[-1] > 1.0:
        law = updated(law, other, planned_s=1.0, step_s=1.0)
        seen.append(law.devices["a"].slowness)
    assert seen == sorted(seen, reverse=True) and seen[7] == pytest.approx(2, rel=0.1)
    assert len(seen) < 40 and seen[-1] == 1.0
    of_other_m = updated(slow, replace(other, num_micro_batches=2), planned_s=1.0, step_s=1.0)
    assert of_other_m.devices["a"].slowness == pytest.approx(4.0**0.9)
    faster = replace(quiet, devices={"a": DeviceTimes(1 / 3, 0.004, "a", slowness=1.0)})
    later = updated(slow, faster, planned_s=1.0, step_s=1.0).devices["a"]
    assert later.slowness == pytest.approx(2.0)  # a measurement counts half


def test_steps_that_were_repeated_after_a_loss_are_not_measured() -> None:
    """Their recorded tensors need no embedding and no head."""
    law, plan = real_law(64, True), plan_of({"a": 2, "b": 2, "c": 2}, 4)
    clocks = {name: Clock(-ahead_s, 0.0) for name, ahead_s in AHEAD_S.items()}
    devices = taking(BLOCK_S)
    measured, whole = run(law, plan, devices), run(law, plan, devices).step_times(plan, clocks)
    instant = dict.fromkeys(build(plan.schedule, 3, 4)[0], (300.0, 300.0))
    measured.add_own(OwnTimes(instant, instant, 300.0, 300.1, whole=False))
    for name in NAMES:
        measured.add(name, 8, torch.full((8, 4), 300.0, dtype=torch.float64), USAGE)
    assert measured.step_times(plan, clocks) == whole


def test_machines_of_earlier_rounds_are_forgotten_and_the_spread_is_bounded() -> None:
    law = real_law(64, True)
    for boot in range(200):
        devices = {"a": DeviceTimes(1 / 3, 0.004, f"boot-{boot}")}
        now = replace(law, devices=devices, cores={law.host: 64, f"boot-{boot}": 4})
        law = updated(law, now, planned_s=1e-6, step_s=1e6)
    assert law.cores == {law.host: 64, "boot-199": 4, "b": 64, "c": 64}
    assert law.spread == 1.0


@pytest.mark.parametrize(
    ("cores", "send_s", "apart", "advised"),
    [
        (64, 0.001, False, False),  # a core for each device
        (64, 0.5, False, True),
        (1, 0.001, False, False),  # the devices take turns; hops are within the error
        (1, 0.2, False, True),
        (1, 0.001, True, False),  # on other machines
    ],
)
def test_one_process_is_advised_if_it_is_faster_than_devices_of_its_machine(
    cores: int, send_s: float, apart: bool, advised: bool
) -> None:
    law = law_of(NAMES, cores=cores, apart=apart, send_s=send_s, embedding_forward_s=0.01)
    text = without_devices(
        law, works_with(law, NAMES, [*BLOCK_S.values()], [2, 2, 2]), "one_f_one_b"
    )
    assert (text is not None) == advised


def test_the_advised_step_is_the_work_of_one_thread_and_the_head() -> None:
    law = law_of(
        NAMES,
        cores=1,
        m=2,
        send_s=0.1,
        embedding_forward_s=0.01,
        embedding_backward_s=0.03,
        submit_s=0.02,
        head_s=0.4,
        head_pace_s=0.4,
        overhead_s=0.05,
        factor=2.0,
        launch=LaunchTimes(submit_s=0.02, head_s=0.1),
    )
    text = without_devices(
        law, works_with(law, NAMES, [*BLOCK_S.values()], [2, 2, 2]), "one_f_one_b"
    )
    # forward 0.07, two answers of 0.4, backward 0.11, and the overhead
    assert text is not None and "about 2.06 s instead" in text


@pytest.mark.parametrize(("rows", "send_s"), [(6.0, 0.03), (7.0, 0.03), (2.0, 0.01)])
def test_hops_with_other_numbers_of_rows_are_not_averaged(rows: float, send_s: float) -> None:
    quiet = real_law(64, True)
    laws = [
        replace(quiet, devices={"a": DeviceTimes(1 / 3, each_s, "a", rows=each)})
        for each_s, each in ((0.05, 6.0), (0.01, rows))
    ]
    found = updated(*laws, planned_s=1.0, step_s=1.0).devices["a"]
    assert found.send_s == pytest.approx(send_s) and found.rows == rows


def test_a_law_stays_valid_over_many_rounds() -> None:
    """A value that halves in each round becomes 0."""
    law = real_law(64, True)
    slow = DeviceTimes(1 / 3, 0.01, "a", launch_s=1e-3)
    law, idle = replace(law, devices={"a": slow}), replace(law, devices={}, send_s=0.0)
    for _ in range(400):
        law = updated(law, idle, planned_s=1.0, step_s=1.0)
    assert law.devices["a"].launch_s == 0.0 and law.send_s == 0.0


def test_a_fit_to_two_numbers_of_rows_stays_right() -> None:
    """A block takes 1 s per row and 8 s per micro-batch; predictions for two and eight rows are
    right."""
    law, truth = real_law(64, True), {"a": DeviceProfile("a", AffineLaw(1.0, 8.0, 0.0, 0.0))}
    described = {"a": DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0))}
    found = None
    for m in (3, 12, 12, 12, 12):
        plan = ClusterPlan(0, (SegmentPlan("a", Span(0, 6)),), m, "one_f_one_b")
        now = fitted(replace(law, num_micro_batches=m), plan, truth, described, found)
        found = updated(found, now, planned_s=1.0, step_s=1.0) if found else now
    assert found is not None
    time = known(described, found)["a"].time
    assert [time.compute(1, rows) for rows in (2, 8)] == pytest.approx([10.0, 16.0], rel=0.01)


def test_a_device_with_all_shares_of_a_stage_counts_as_a_single_device() -> None:
    """This occurs after a loss; a law has no rows for a single device."""
    shares = Share("a", 3), Share("b", 1)
    segment = SegmentPlan("a", Span(0, 4), shares)
    for each, expected in (
        (segment, HeldStage(("a", "b"), 4, (3, 1))),
        (segment.without({"b"}), HeldStage(("a",), 4)),
    ):
        assert each is not None
        assert held_stages(ClusterPlan(0, (each,), 1, "gpipe")) == (expected,)


def with_launch(m: int) -> StepLaw:
    """Return a law of m micro-batches whose parts of the control unit take a + b/m."""
    law = real_law(64, True)
    launch = LaunchTimes(
        embedding_forward_s=0.001, submit_s=0.0005, send_s=0.004, head_s=0.02, head_pace_s=0.01
    )
    return replace(law, launch=launch).with_micro_batches(m)


def test_launch_times_follow_from_two_numbers_of_micro_batches() -> None:
    """Then times of a third number are right; one number alone cannot tell them apart."""
    few, many, third = map(with_launch, (2, 4, 8))
    for before, now in ((few, many), (many, few)):
        unknown = [replace(each, launch=LaunchTimes()) for each in (before, now)]
        law = updated(*unknown, planned_s=1.0, step_s=1.0)
        assert astuple(law.launch) == pytest.approx(astuple(third.launch), abs=1e-12)
        assert law.with_micro_batches(8).head_s == pytest.approx(third.head_s)
        same = updated(law, replace(now, launch=LaunchTimes()), planned_s=1.0, step_s=1.0)
        assert same.launch == law.launch
    alone = updated(few, replace(few, launch=LaunchTimes()), planned_s=1.0, step_s=1.0)
    assert alone.launch == few.launch


def test_noise_makes_no_impossible_launch_times() -> None:
    """A smaller micro-batch may seem to take longer, or a larger one more than in proportion."""
    law, other = real_law(64, True), replace(real_law(64, True), num_micro_batches=2)
    known = LaunchTimes()
    for factor, share in ((0.2, 1.0), (5.0, 0.0)):
        slow = replace(other, **{name: factor * getattr(other, name) for name in OWN_TIMES})
        found = launch_times(slow, law, known)
        expected = [share * getattr(law, name) for name in OWN_TIMES]
        assert astuple(found) == pytest.approx(expected)
    none = replace(other, head_pace_s=0.0)  # it never had a queue
    for each in ((none, law), (law, none)):
        assert launch_times(*each, known).head_pace_s == 0.0
    close = replace(real_law(64, True), num_micro_batches=3)
    assert launch_times(close, law, known) == known
    rounded = replace(law, num_micro_batches=6, head_s=0.1), replace(other, head_s=0.3)
    for each in (rounded, rounded[::-1]):
        assert launch_times(*each, known).head_s == 0.0


def test_the_pace_of_answers_stays_while_the_head_has_no_queue() -> None:
    """Other micro-batches have another pace, which was not measured then."""
    law, none = real_law(64, True), replace(real_law(64, True), head_pace_s=0.0)
    assert updated(law, none, planned_s=1.0, step_s=1.0).head_pace_s == law.head_pace_s
    none = replace(none, num_micro_batches=2)
    assert updated(law, none, planned_s=1.0, step_s=1.0).head_pace_s == 0.0


def test_a_trial_with_another_number_of_micro_batches_adds_its_plan() -> None:
    stages = stages_of({"a": 6})
    few, many = (
        replace(with_launch(m), measured=(MeasuredPlan(stages, m, 1.0, "gpipe"),)) for m in (2, 4)
    )
    law = with_other_size(replace(many, launch=LaunchTimes()), few)
    assert astuple(law.launch) == pytest.approx(astuple(many.launch))
    assert law.num_micro_batches == 4
    assert law.measured == (*many.measured, replace(few.measured[0], weight=0.8))
    again = replace(many, launch=LaunchTimes())
    assert with_other_size(many, again) == many  # that cluster could have no other number
    quick = replace(few, launch=LaunchTimes(), head_s=many.launch.head_s / 2)  # noise
    assert with_other_size(many, quick).launch.head_s == many.head_s


def test_times_that_become_too_small_for_a_law_count_as_none() -> None:
    law = replace(real_law(64, True), head_s=1e-15, head_pace_s=0.0)
    assert law.with_micro_batches(4096).head_s == 0.0
