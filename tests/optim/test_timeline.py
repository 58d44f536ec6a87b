"""A batch's chart is what the law says: nobody does two things at once, and it ends in time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.state import AffineLaw, DeviceProfile
from optim.latency import pipeline_latency
from optim.problem import ClusterProblem, Latency, Partition
from optim.timeline import SegmentTimes, timeline

LATENCIES: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")
figures = st.just(0.0) | st.floats(1e-6, 2.0)
laws = st.builds(AffineLaw, u=st.floats(0.01, 2.0), v=figures, w=figures, ell=figures)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ClusterProblem, Partition]:
    """A problem under any law, and a partition of it."""
    blocks = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    devices = tuple(DeviceProfile(f"d{k}", draw(laws)) for k in range(len(blocks)))
    latency, batch_size = draw(st.sampled_from(LATENCIES)), draw(st.integers(1, 32))
    problem = ClusterProblem(devices, sum(blocks), batch_size, batch_size, latency)
    m = draw(st.integers(1, min(batch_size, 9)))
    seconds = pipeline_latency(devices, blocks, batch_size, m, latency)
    return problem, Partition(tuple(blocks), m, seconds)


@given(cases())
def test_the_last_hop_ends_when_the_law_says(case: tuple[ClusterProblem, Partition]) -> None:
    problem, partition = case
    last = timeline(problem, partition)[-1]
    end = last.hops[-1] + last.hop_s
    if problem.latency == "bound":  # whose last slot is as long as the slowest chunk
        assert end <= partition.latency_s * (1 + 1e-9)
    else:
        assert end == pytest.approx(partition.latency_s, rel=1e-9)


@given(cases())
def test_nobody_does_two_things_at_once(case: tuple[ClusterProblem, Partition]) -> None:
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
def test_a_micro_batch_arrives_before_it_is_worked_on(
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


def test_replicas_work_side_by_side() -> None:
    devices = tuple(DeviceProfile(f"d{k}", AffineLaw(1.0 + k, 0.5, 9.0, 9.0)) for k in range(2))
    problem = ClusterProblem(devices, 3, 8, 8, "overlap")
    stages = timeline(problem, Partition((3, 3), 1, 25.5, replicated=True))
    assert [whole(stage) for stage in stages] == [(0.0, 13.5, 0.0), (0.0, 25.5, 0.0)]


def whole(stage: SegmentTimes) -> tuple[float, float, float]:
    return stage.first_s, stage.last_s, stage.hop_s


def assert_not_before(time: float, earliest: float) -> None:
    assert time >= earliest - 1e-9 * max(1.0, earliest)
