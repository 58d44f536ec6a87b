"""A batch's timeline agrees with the law, and no device or link does two things at once."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.state import AffineLaw, DeviceProfile
from optim.latency import batch_s, partition_of
from optim.problem import ClusterProblem, Latency, Partition
from optim.timeline import SegmentTimes, stages_after_encoder, timeline
from tests.optim.discrete_event import Line, Station

LATENCIES: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")
figures = st.just(0.0) | st.floats(1e-6, 2.0)
waits = st.just(0.0) | st.floats(1e-3, 20.0)
laws = st.builds(AffineLaw, u=st.floats(0.01, 2.0), v=figures, w=figures, ell=figures)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ClusterProblem, Partition]:
    """Draw a problem under any law, with an uplink, a head and a downlink, and a partition of
    it."""
    blocks = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    devices = tuple(DeviceProfile(f"d{k}", draw(laws)) for k in range(len(blocks)))
    latency, batch_size = draw(st.sampled_from(LATENCIES)), draw(st.integers(1, 32))
    uplinks_s, later_s = (draw(waits),), (draw(waits), draw(waits))
    sizes = sum(blocks), batch_size, batch_size
    problem = ClusterProblem(devices, *sizes, latency, uplinks_s, *later_s)
    m = draw(st.integers(1, min(batch_size, 9)))
    return problem, partition_of(problem, blocks, m)


@given(cases())
def test_the_last_hop_ends_at_the_time_of_the_law(case: tuple[ClusterProblem, Partition]) -> None:
    """The head and the downlink take no time here."""
    problem = replace(case[0], head_s=0.0, gradient_s=0.0)
    partition = partition_of(problem, case[1].blocks, case[1].num_micro_batches)
    last = timeline(problem, partition)[-1]
    end = last.hops[-1] + last.hop_s
    if problem.latency == "bound":  # its last slot is as long as the slowest chunk
        assert end <= partition.latency_s * (1 + 1e-9)
    else:
        assert end == pytest.approx(partition.latency_s, rel=1e-9)


@given(cases())
def test_the_last_stage_after_the_encoder_ends_at_the_time_of_the_law(
    case: tuple[ClusterProblem, Partition],
) -> None:
    """Each stage takes an equal time per micro-batch. Stages that take no time are omitted."""
    problem, partition = case
    (uplink_s,), m = problem.activation_s, partition.num_micro_batches
    found = stages_after_encoder(problem, partition, uplink_s)
    totals_s = {"uplink": uplink_s, "head": problem.head_s, "gradients": problem.gradient_s}
    expected = {name: pytest.approx(each / m) for name, each in totals_s.items() if each}
    assert {stage.name: stage.each_s for stage in found} == expected
    if found:
        end = found[-1].starts[-1] + found[-1].each_s
        assert end == pytest.approx(batch_s(partition, uplink_s), rel=1e-9)


@given(cases())
def test_stages_after_the_encoder_begin_when_micro_batches_arrive(
    case: tuple[ClusterProblem, Partition],
) -> None:
    """Compared with an event-by-event simulation of all stages."""
    problem, partition = case
    (uplink_s,), m = problem.activation_s, partition.num_micro_batches
    chunks = [
        (device.time.compute(held, problem.batch_size / m), device.time.hop(problem.batch_size / m))
        for device, held in zip(problem.devices, partition.blocks, strict=True)
        if held
    ]
    machines = [compute + hop for compute, hop in chunks]
    if problem.latency == "overlap":
        machines = [time for chunk in chunks for time in chunk]
    elif problem.latency == "bound":
        machines = [max(machines)] * len(machines)
    later_s = {
        "uplink": uplink_s / m,
        "head": problem.head_s / m,
        "gradients": problem.gradient_s / m,
    }
    line = Line([Station("", each, 0.0) for each in (*machines, *later_s.values())])
    line.run(m)
    places = {name: len(machines) + place for place, name in enumerate(later_s)}
    for stage in stages_after_encoder(problem, partition, uplink_s):
        assert stage.starts == pytest.approx(line.starts_s[places[stage.name]], rel=1e-9, abs=1e-12)


def test_replicas_have_no_stages_after_the_encoder() -> None:
    devices = tuple(DeviceProfile(f"d{k}", AffineLaw(1.0, 0.5, 9.0, 9.0)) for k in range(2))
    problem = ClusterProblem(devices, 3, 8, 8, "overlap", head_s=3.0, gradient_s=2.0)
    assert stages_after_encoder(problem, Partition((3, 3), 1, 13.5, replicated=True), 5.0) == ()


@given(cases())
def test_no_device_or_link_does_two_things_at_once(case: tuple[ClusterProblem, Partition]) -> None:
    problem, partition = case
    stages = timeline(problem, partition)
    assert sum(stage.span.blocks for stage in stages) == problem.num_blocks
    for stage in stages:
        for begin, following in pairwise(stage.computes):
            assert_not_before(following, begin + stage.compute_s)
        for begin, following in pairwise(stage.hops):
            assert_not_before(following, begin + stage.hop_s)
        if problem.latency != "overlap":
            for begin, following in zip(stage.hops, stage.computes[1:], strict=False):
                assert_not_before(following, begin + stage.hop_s)


@given(cases())
def test_a_micro_batch_arrives_before_it_is_computed(
    case: tuple[ClusterProblem, Partition],
) -> None:
    stages = timeline(*case)
    for stage in stages:
        for compute, hop in zip(stage.computes, stage.hops, strict=True):
            assert_not_before(hop, compute + stage.compute_s)
    for before, after in pairwise(stages):
        assert before.span.stop == after.span.first
        for hop, compute in zip(before.hops, after.computes, strict=True):
            assert_not_before(compute, hop + before.hop_s)


def test_replicas_compute_in_parallel() -> None:
    devices = tuple(DeviceProfile(f"d{k}", AffineLaw(1.0 + k, 0.5, 9.0, 9.0)) for k in range(2))
    problem = ClusterProblem(devices, 3, 8, 8, "overlap")
    stages = timeline(problem, Partition((3, 3), 1, 25.5, replicated=True))
    assert [whole(stage) for stage in stages] == [(0.0, 13.5, 0.0), (0.0, 25.5, 0.0)]


def whole(stage: SegmentTimes) -> tuple[float, float, float]:
    return stage.computes[0], stage.computes[-1] + stage.compute_s, stage.hop_s


def assert_not_before(time: float, earliest: float) -> None:
    assert time >= earliest - 1e-9 * max(1.0, earliest)
