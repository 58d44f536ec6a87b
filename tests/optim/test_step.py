"""Simulated steps against a longest path, against a formula, and on shared cores."""

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_laws import HOST, law_of, works_with

from collapipe.state import AffineLaw, DeviceProfile
from collapipe.step_law import HeldStage
from optim.jobs import Job, Worker, simulate
from optim.step import DeviceWork, StageWork, alone, play, step_s, works_of
from pipeline.schedule import BACKWARD, FORWARD, SCHEDULES, Action, build, embedding

SECONDS = st.floats(0.001, 1.0)


def test_jobs_share_the_cores_of_their_machine() -> None:
    jobs = {name: Job(1.0) for name in "abc"}
    for cores, ends in ((1, 3.0), (2, 1.5), (3, 1.0)):
        workers = [Worker((name,), HOST) for name in "abc"]
        ran = simulate(jobs, workers, {HOST: cores})
        assert [end for _, end in ran.values()] == pytest.approx([ends] * 3)
    elsewhere = [Worker(("a",), HOST), Worker(("b",), "there"), Worker(("c",))]
    ran = simulate(jobs, elsewhere, {HOST: 1, "there": 1})
    assert [end for _, end in ran.values()] == [1.0] * 3


def test_a_worker_takes_the_first_lane_that_can_begin() -> None:
    jobs = {"late": Job(1.0, ("slow",)), "slow": Job(3.0), "x": Job(2.0), "y": Job(2.0)}
    ran = simulate(jobs, [Worker((["late"], ["x", "y"])), Worker((["slow"],))], {})
    assert ran == {"x": (0, 2), "slow": (0, 3), "y": (2, 4), "late": (4, 5)}


@given(
    pairs=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4),
    m=st.integers(1, 6),
    send_s=st.just(0.0) | SECONDS,
    head_s=st.just(0.0) | SECONDS,
    name=st.sampled_from(sorted(SCHEDULES)),
)
def test_free_cores_give_the_longest_path(
    pairs: list[tuple[float, float]], m: int, send_s: float, head_s: float, name: str
) -> None:
    """An independent recursion: an action begins after its device's earlier action and its
    input."""
    devices = [DeviceWork(*pair, send_s, None) for pair in pairs]
    works = [StageWork((each,)) for each in devices]
    lists, last = build(name, len(works), m), len(works)

    @cache
    def sent(stage: int, action: Action) -> float:
        """Return when a tensor has been sent; a link sends one tensor at a time."""
        before = (
            sent(stage, Action(action.kind, action.micro_batch - 1)) if action.micro_batch else 0
        )
        return max(ended(stage, action), before) + send_s

    @cache
    def ended(stage: int, action: Action) -> float:
        if stage < 0:
            own = embedding(name, last, m)
            place = own.index(action)
            before = ended(stage, own[place - 1]) if place else 0.0
            return before if action.kind == FORWARD else max(before, ended(0, action))
        if stage == last:
            number = action.micro_batch
            before = ended(stage, Action(BACKWARD, number - 1)) if number else 0.0
            arrived_s = sent(stage - 1, Action(FORWARD, number))
            return arrived_s if action.kind == FORWARD else max(arrived_s, before) + head_s
        place = lists[stage].index(action)
        before = ended(stage, lists[stage][place - 1]) if place else 0.0
        source = stage - 1 if action.kind == FORWARD else stage + 1
        work = devices[stage]
        seconds = work.forward_s if action.kind == FORWARD else work.backward_s
        return max(before, sent(source, action)) + seconds

    law = law_of([], m=m, send_s=send_s, head_s=head_s, head_pace_s=head_s)
    expected_s = max(
        ended(0, Action(BACKWARD, number)) for number in range(m)
    )  # no transfer back to the embedding
    assert step_s(law, works, name) == pytest.approx(expected_s)


def test_one_micro_batch_takes_the_sum_of_all_times() -> None:
    law = law_of(
        "ab",
        m=1,
        embedding_forward_s=1.0,
        embedding_backward_s=2.0,
        submit_s=4.0,
        send_s=8.0,
        head_s=16.0,
        head_pace_s=5.0,
        overhead_s=32.0,
    )
    blocks_s = 2 * 64.0 + 3 * 128.0
    works = works_with(law, "ab", [64.0, 128.0], [2, 3])
    assert step_s(law, works, "gpipe") == 1 + 2 + 4 + 16 + 32 + 6 * 8 + blocks_s


@given(
    blocks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    cores=st.integers(1, 4),
    m=st.integers(1, 6),
)
def test_no_step_is_faster_than_its_cores_allow(blocks: list[int], cores: int, m: int) -> None:
    names = [str(place) for place in range(len(blocks))]
    law = law_of(names, m=m, cores=cores, embedding_forward_s=0.2)
    seconds = step_s(law, works_with(law, names, [1.0] * len(blocks), blocks), "one_f_one_b")
    assert seconds >= m * (sum(blocks) + 0.2) / cores - 1e-9
    assert seconds >= sum(blocks) + 0.2 - 1e-9


@pytest.mark.parametrize("apart", [False, True])
def test_more_devices_help_only_on_separate_machines(apart: bool) -> None:
    law = law_of("abc", cores=1, apart=apart, send_s=0.003, embedding_forward_s=0.001)
    cuts = {"a": [6], "ab": [3, 3], "abc": [2, 2, 2]}
    times = [
        step_s(law, works_with(law, names, [0.01] * len(cut), cut), "one_f_one_b")
        for names, cut in cuts.items()
    ]
    best = times.index(min(times))
    assert best == (2 if apart else 0)


def test_waiting_for_cores_is_removed_from_measured_times() -> None:
    law = law_of("abc", cores=2, send_s=0.003, embedding_forward_s=0.004)
    works = works_with(law, "abc", [0.01] * 3, [2, 2, 2])
    less, alone_works = alone(law, works, "one_f_one_b")
    ran = play(less, alone_works, "one_f_one_b")
    for stage, work in enumerate(each.devices[0] for each in works):
        for kind, seconds in ((FORWARD, work.forward_s), (BACKWARD, work.backward_s)):
            own = [end - begin for key, (begin, end) in ran.items() if key[:2] == (stage, kind)]
            assert math.fsum(own) / len(own) == pytest.approx(seconds, rel=0.02)
    assert alone_works[1].devices[0].backward_s < works[1].devices[0].backward_s


@pytest.mark.parametrize(
    ("w", "ell", "send_s"), [(1.0, 0.0, 0.3), (0.0, 1.0, 0.9), (1.0, 3.0, 0.6)]
)
def test_hop_times_depend_on_the_rows_of_a_share(w: float, ell: float, send_s: float) -> None:
    """Three rows took 0.9 s. The device's law determines which part of this depends on the rows."""
    law = law_of("ab", m=1)
    times = {name: replace(each, send_s=0.9, rows=3.0) for name, each in law.devices.items()}
    devices = {name: DeviceProfile(name, AffineLaw(1.0, 0.0, w, ell)) for name in "ab"}
    stage = HeldStage(("a", "b"), 2, (1, 3))
    (work,) = works_of(replace(law, devices=times), [stage], devices, 4)
    assert [each.send_s for each in work.devices] == pytest.approx([send_s, 0.9])
    assert [each.forward_s + each.backward_s for each in work.devices] == [2.0, 6.0]


@pytest.mark.parametrize(
    ("rows", "begins_s"),
    [((2, 2), [1.0, 3.0]), ((3, 1), [3.0, 3.0]), ((1, 3), [1.0, 3.0])],
)
def test_a_device_waits_for_the_devices_that_send_its_rows(
    rows: tuple[int, int], begins_s: list[float]
) -> None:
    """Two devices of the previous stage have two rows each, and take 1 s and 3 s."""
    slow, quick = DeviceWork(3.0, 0.0, 0.0, None), DeviceWork(1.0, 0.0, 0.0, None)
    works = [StageWork((quick, slow), rows=(2, 2)), StageWork((quick, quick), rows=rows)]
    ran = play(law_of("", m=1), works, "gpipe")
    assert [ran[device, FORWARD, 0][0] for device in (2, 3)] == begins_s
