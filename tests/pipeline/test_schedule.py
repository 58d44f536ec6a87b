"""A schedule is verified before it runs: it is complete and has no deadlock."""

from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from drawn_schedule import render
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError, ScheduleError
from pipeline.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Action,
    Schedule,
    build,
    gpipe,
    kept,
    one_f_one_b,
    verify,
)

segment_counts = st.integers(1, 6)
micro_batch_counts = st.integers(1, 8)
names = st.sampled_from(sorted(SCHEDULES))


def schedule_of(*stages: str) -> Schedule:
    """A schedule from one string per stage, such as ``"F0 B0"``."""
    return tuple(
        tuple(Action(word[0], int(word[1:])) for word in stage.split()) for stage in stages
    )


def in_order(schedule: Schedule) -> bool:
    """Whether gradients add up in the order of micro-batches on every stage."""
    orders = [
        [action.micro_batch for action in actions if action.kind == BACKWARD]
        for actions in schedule
    ]
    return all(order == sorted(order) for order in orders)


def can_end(schedule: Schedule) -> bool:
    """Whether the dependencies of all actions form a graph without a cycle; the reference."""
    graph: TopologicalSorter[tuple[int, Action]] = TopologicalSorter()
    last = len(schedule) - 1
    for stage, actions in enumerate(schedule):
        for before, action in zip((None, *actions), actions, strict=False):
            graph.add((stage, action))
            if before is not None:
                graph.add((stage, action), (stage, before))
            if action.kind == FORWARD and stage > 0:
                graph.add((stage, action), (stage - 1, action))
            if action.kind == BACKWARD:
                graph.add((stage, action), (stage, Action(FORWARD, action.micro_batch)))
            if action.kind == BACKWARD and stage < last:
                graph.add((stage, action), (stage + 1, action))
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


@st.composite
def disturbed(draw: st.DrawFn) -> Schedule:
    """A valid schedule with a few swapped neighbours, or with stages in random order."""
    stages = [
        list(stage)
        for stage in build(draw(names), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    ]
    if draw(st.booleans()):
        return tuple(tuple(draw(st.permutations(stage))) for stage in stages)
    for _ in range(draw(st.integers(0, 6))):
        stage = draw(st.sampled_from(stages))
        place = draw(st.integers(0, len(stage) - 2))
        stage[place : place + 2] = reversed(stage[place : place + 2])
    return tuple(map(tuple, stages))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_segments", range(1, 7))
def test_built_schedules_are_complete_and_free_of_deadlock(name: str, num_segments: int) -> None:
    """For 1 to 8 micro-batches; each stage runs forwards and backwards in order of
    micro-batches."""
    for num_micro_batches in range(1, 9):
        schedule = build(name, num_segments, num_micro_batches)
        verify(schedule)
        assert can_end(schedule)
        assert len(schedule) == num_segments + 1
        for actions in schedule:
            for kind in {action.kind for action in actions}:
                order = [action.micro_batch for action in actions if action.kind == kind]
                assert order == list(range(num_micro_batches))


def test_schedules_equal_the_figures_of_the_papers() -> None:
    gpipe_head = "F0 B0 F1 B1 F2 B2"
    assert gpipe(1, 3) == schedule_of("F0 F1 F2 B0 B1 B2", gpipe_head)
    assert one_f_one_b(2, 3) == schedule_of("F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", gpipe_head)


@given(segment_counts, micro_batch_counts)
def test_kept_micro_batches_follow_the_formulas(num_segments: int, num_micro_batches: int) -> None:
    """GPipe keeps m; 1F1B keeps min(m, S + 1 − s) on stage s."""
    sizes = num_segments, num_micro_batches
    assert kept("gpipe", *sizes) == (num_micro_batches,) * num_segments
    few = tuple(min(num_micro_batches, num_segments + 1 - stage) for stage in range(num_segments))
    assert kept("one_f_one_b", *sizes) == few


@given(disturbed())
def test_verify_agrees_with_a_search_for_cycles(schedule: Schedule) -> None:
    """For valid schedules, swapped actions and random orders."""
    if in_order(schedule) and can_end(schedule):
        verify(schedule)
    else:
        why = "deadlock" if in_order(schedule) else "in the order of micro-batches"
        with pytest.raises(ScheduleError, match=why):
            verify(schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"),  # each waits for the other
            "deadlock: stage 0 before B0, stage 1 before F1",
        ),
        (
            schedule_of("B0 F0", "F0 B0"),  # a stage waits for itself
            "deadlock: stage 0 before B0, stage 1 before F0",
        ),
        (
            schedule_of("F0 F1 B0 B1", "F0 B0 F1 B1", "F1 F0 B0 B1"),
            "deadlock: stage 0 before B0, stage 1 before B0, stage 2 before F1",
        ),
        (
            schedule_of("F0 F1 B0 B1", "F1 F0 B0 B1", "F1 F0 B0 B1"),
            None,
        ),
    ],
)
def test_planted_deadlocks_are_found(schedule: Schedule, message: str | None) -> None:
    """The message names the action at which each stage waits; an unusual order without deadlock is
    valid."""
    if message is None:
        verify(schedule)
    else:
        with pytest.raises(ScheduleError) as caught:
            verify(schedule)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            schedule_of("F0 F1 B1 B0", "F0 F1 B1 B0"),  # this order has no deadlock
            "stage 0 has B0 after B1; gradients must add up in the order of micro-batches",
        ),
        (schedule_of("F0 F1 B0", "F0 B0 F1 B1"), "stage 0 has B1 0 times, not once"),
        (schedule_of("F0 B0 X0", "F0 B0"), "stage 0 has X0; expected F or B"),
    ],
)
def test_wrong_orders_and_unknown_kinds_are_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert str(caught.value) == message


@given(st.data(), names, segment_counts, micro_batch_counts)
def test_missing_and_repeated_actions_are_named(
    data: st.DataObject, name: str, num_segments: int, num_micro_batches: int
) -> None:
    """The message names the stage and how often the action occurs."""
    stages = [list(stage) for stage in build(name, num_segments, num_micro_batches)]
    stage = data.draw(st.integers(0, num_segments))
    place = data.draw(st.integers(0, len(stages[stage]) - 1))
    action, repeated = stages[stage][place], data.draw(st.booleans())
    if repeated:
        stages[stage].insert(data.draw(st.integers(0, len(stages[stage]))), action)
    else:
        del stages[stage][place]
    with pytest.raises(ScheduleError) as caught:
        verify(tuple(map(tuple, stages)))
    assert str(caught.value) == f"stage {stage} has {action} {2 * repeated} times, not once"


@given(names, segment_counts, micro_batch_counts)
def test_render_draws_every_action_once(
    name: str, num_segments: int, num_micro_batches: int
) -> None:
    """Each stage has a line in the order of its actions; each action is drawn after its
    dependencies."""
    schedule = build(name, num_segments, num_micro_batches)
    lines = render(schedule).splitlines()
    labels = [*(f"segment {stage}" for stage in range(num_segments)), "head"]
    assert [line[: len("segment 0")].rstrip() for line in lines] == labels
    cells = [line[len("segment 0") :].split() for line in lines]
    for row, actions in zip(cells, schedule, strict=True):
        assert [cell for cell in row if cell != "·"] == list(map(str, actions))
    columns = {
        (stage, cell): column
        for stage, row in enumerate(cells)
        for column, cell in enumerate(row)
        if cell != "·"
    }
    for (stage, cell), column in columns.items():
        needed = (stage - 1 if cell.startswith(FORWARD) else stage + 1, cell)
        assert columns.get(needed, -1) < column
    busy = Counter(column for column in columns.values())
    assert set(busy) == set(range(max(map(len, cells))))  # no slot is idle in all stages


@pytest.mark.timeout(30)  # without verification, rendering would not end
def test_render_verifies_first() -> None:
    """A deadlock is an error and not an endless loop."""
    with pytest.raises(ScheduleError, match="deadlock"):
        render(schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"))


def test_an_unknown_schedule_is_named() -> None:
    """The message lists the known schedules."""
    with pytest.raises(ConfigError, match=r"pipeline\.schedule=zigzag: .* gpipe, one_f_one_b"):
        build("zigzag", 2, 2)
