"""Cluster plans are checked when they are created, and replaced after devices are lost."""

from fractions import Fraction
from itertools import accumulate, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.row_shares import connected, leaders
from collapipe.state import received_gradients


def segments(*spans: tuple[int, int]) -> tuple[SegmentPlan, ...]:
    """One segment and one device for each (first, blocks)."""
    return tuple(SegmentPlan(f"device-{k}", Span(*span)) for k, span in enumerate(spans))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_contiguous_segments_cover_every_block_once(sizes: list[int]) -> None:
    spans = [(sum(sizes[:k]), size) for k, size in enumerate(sizes)]
    plan = ClusterPlan(0, segments(*spans), 1, "gpipe")
    covered = [index for segment in plan.segments for index in segment.span.indices()]
    assert covered == list(range(sum(sizes)))


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30), st.integers(1, 60))
def test_no_device_receives_more_gradients_than_planned(rows: list[int], blocks: int) -> None:
    """A device's memory is planned for the gradients that it receives."""
    led = leaders(rows, blocks)
    for number, own in enumerate(rows):
        received = (len(rows) - 1) * led.count(number)
        assert received <= received_gradients(blocks, own / sum(rows), len(rows)) * (1 + 1e-9)


@given(*[st.lists(st.integers(1, 9), min_size=1, max_size=5)] * 2)
def test_devices_of_two_stages_are_connected_if_some_micro_batch_has_rows_in_both(
    rows: list[int], others: list[int]
) -> None:
    ends = [
        [Fraction(e, sum(each)) for e in accumulate(each, initial=0)] for each in (rows, others)
    ]
    assert connected(rows, others) == [
        (a, b)
        for a, (first, end) in enumerate(pairwise(ends[0]))
        for b, (start, stop) in enumerate(pairwise(ends[1]))
        if max(first, start) < min(end, stop)
    ]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.sets(st.integers(0, 4)),
    st.integers(1, 9),
)
def test_gradients_are_counted_for_each_share_that_a_device_keeps(
    rows: list[int], lost: set[int], blocks: int
) -> None:
    """A device keeps all shares' gradients of the blocks that it leads, and of other blocks only
    the gradients that it computed. This also holds if it has taken over shares of a lost device.
    The planner never counts fewer.
    """
    names = [f"device-{number}" for number in range(len(rows))]
    whole = SegmentPlan(names[0], Span(0, blocks), tuple(map(Share, names, rows)))
    segment = whole.without({name for number, name in enumerate(names) if number in lost})
    for device in segment.devices if segment else ():
        kept = sum(
            len(rows) if leader == device else len(segment.shares_of(device))
            for leader in segment.leaders
        )
        assert segment.extra_gradients(device) == kept - blocks
        own, part = (
            segment.shares_of(device),
            dict(zip(segment.devices, segment.parts, strict=True)),
        )
        planned = received_gradients(
            blocks,
            part[device] / sum(segment.parts),
            len(segment.devices),
            len(own),
            len(rows) - len(own),
        )
        assert kept - blocks <= planned * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.sets(st.integers(0, 7)),
    st.integers(0, 2),
)
def test_the_segments_of_lost_devices_are_assigned_to_other_devices(
    stages: list[tuple[int, list[int]]], lost: set[int], spare: int
) -> None:
    """Every new plan has the same shares of each block, no lost device, and no device twice."""
    held, first, number = list[SegmentPlan](), 0, 0
    for blocks, rows in stages:
        shares = tuple(Share(str(number + k), own) for k, own in enumerate(rows))
        own = shares if len(rows) > 1 else ()
        held.append(SegmentPlan(str(number), Span(first, blocks), own))
        first, number = first + blocks, number + len(rows)
    plan = ClusterPlan(0, tuple(held), 1, "gpipe")
    removed, free = {str(each) for each in lost}, [f"free-{k}" for k in range(spare)]
    found = list(islice(plan.without(removed, free), 1000))
    assert len(found) == len({*found})
    for each in found:
        used = [name for segment in each.segments for name in segment.devices]
        assert len(used) == len({*used})
        assert not {*used} & removed
        assert rows_of_blocks(each) == rows_of_blocks(plan)
    whole = len([each for each in held if not {*each.devices} <= removed])
    if len(held) - whole <= spare or (whole and not plan.shares):
        assert found
    if whole + spare == 0:
        assert not found


def test_a_neighbour_takes_over_consecutive_lost_segments() -> None:
    """Device c is the only candidate: d already has to take over the share of e."""
    ends = SegmentPlan("d", Span(3, 1), (Share("d", 1), Share("e", 1)))
    alone = [SegmentPlan(name, Span(k, 1)) for k, name in enumerate("abc")]
    (found,) = ClusterPlan(0, (*alone, ends), 1, "gpipe").without({"a", "b", "e"})
    assert [(each.device, each.span.blocks) for each in found.segments] == [("c", 3), ("d", 1)]


def test_recomputed_blocks_stay_recomputed_on_another_device() -> None:
    """Without recomputation, the blocks may need more memory than was planned."""
    lost = SegmentPlan("a", Span(0, 1), recomputing=("a",))
    assert lost.on("b").recomputing == ("b",)
    assert SegmentPlan("b", Span(1, 1)).with_blocks_of(lost).recomputing == ("b",)


def test_plans_after_many_losses_are_generated_lazily() -> None:
    """With 30 free devices for 12 lost stages, there are too many plans to list."""
    alone = [SegmentPlan(f"box-{k}", Span(k, 1)) for k in range(12)]
    pair = SegmentPlan("a", Span(12, 1), (Share("a", 1), Share("b", 1)))
    plan, free = ClusterPlan(0, (*alone, pair), 1, "gpipe"), [f"free-{k}" for k in range(30)]
    first = next(plan.without({each.device for each in alone}, free))
    assert [each.device for each in first.segments] == [*free[:12], "a"]


def test_too_few_devices_for_lost_segments_are_noticed_at_once() -> None:
    """The last stage's devices can take 13 of 14 lost segments in 13! ways, too many to try."""
    lost = [SegmentPlan(f"box-{k}", Span(k, 1), (Share(f"box-{k}", 1),) * 2) for k in range(14)]
    shares = tuple(Share(f"left-{k}", 1) for k in range(14))
    plan = ClusterPlan(0, (*lost, SegmentPlan("left-0", Span(14, 1), shares)), 1, "gpipe")
    assert not [*plan.without({each.device for each in lost})]
    assert next(plan.without({each.device for each in lost[1:]}))


def test_a_loss_changes_recomputation_only_in_the_changed_segment() -> None:
    """The device that remains of the first segment recomputes; the second segment is unchanged."""
    pairs = [
        SegmentPlan(a, Span(k, 1), (Share(a, 1), Share(b, 1)), (a,))
        for k, (a, b) in enumerate(("ab", "cd"))
    ]
    (found,) = ClusterPlan(0, tuple(pairs), 1, "gpipe").without({"a"})
    assert [each.recomputing for each in found.segments] == [("b",), ("c",)]


def rows_of_blocks(plan: ClusterPlan) -> list[tuple[int, ...]]:
    return [each.rows for each in plan.segments for _ in each.span.indices()]


@pytest.mark.parametrize(("first", "blocks"), [(-1, 2), (0, 0), (3, -1)])
def test_impossible_spans_are_refused(first: int, blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"span of {blocks} blocks from block {first} is"):
        Span(first, blocks)


@pytest.mark.parametrize(
    ("spans", "device", "start", "expected"),
    [
        ([(1, 2)], "device-0", 1, 0),
        ([(0, 2), (3, 1)], "device-1", 3, 2),  # a block is missing
        ([(0, 2), (1, 1)], "device-1", 1, 2),  # a block is held twice
        ([(2, 2), (0, 2)], "device-0", 2, 0),
    ],
)
def test_gaps_and_overlaps_between_segments_are_errors(
    spans: list[tuple[int, int]], device: str, start: int, expected: int
) -> None:
    """The error names the device and the block at which its segment should start."""
    with pytest.raises(ConfigError, match=f"unit 7: .*{device} .* {start}, expected {expected};"):
        ClusterPlan(7, segments(*spans), 2, "gpipe")


def test_a_plan_needs_a_micro_batch() -> None:
    """The number of micro-batches m is at least 1."""
    with pytest.raises(ConfigError, match="unit 7: 0 micro-batches; at least 1"):
        ClusterPlan(7, segments((0, 1)), 0, "gpipe")
