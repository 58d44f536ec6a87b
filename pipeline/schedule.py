"""A schedule is data: a list of actions per stage, which can be checked, counted and drawn.

Stages 0 … S − 1 are the segments, stage S is the head (the decoder behind its link, or a local
head). ``F2`` on a stage needs ``F2`` of the stage before it; ``B2`` needs ``B2`` of the stage
behind it and its own ``F2``. Gradients always accumulate in the order of micro-batches, so that
all schedules give the same bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from collapipe.errors import ConfigError, ScheduleError

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward of one micro-batch."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]


def gpipe(num_segments: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): a segment keeps m micro-batches."""
    forwards = tuple(Action(FORWARD, i) for i in range(num_micro_batches))
    backwards = tuple(Action(BACKWARD, i) for i in range(num_micro_batches))
    head = _alternate(0, num_micro_batches)
    return (*((forwards + backwards,) * num_segments), head)


def one_f_one_b(num_segments: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward (Narayanan et al. 2019): segment s keeps S + 1 − s at most."""
    return tuple(
        _alternate(num_segments - stage, num_micro_batches) for stage in range(num_segments + 1)
    )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


@functools.lru_cache
def build(name: str, num_segments: int, num_micro_batches: int) -> Schedule:
    """The schedule called ``name``, verified. Raises ``ConfigError`` for an unknown one."""
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule={name}: must be one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name](num_segments, num_micro_batches)
    verify(schedule)
    return schedule


def ready(action: Action, stage: int, done: list[set[Action]]) -> bool:
    """Whether what ``action`` needs is among the actions ``done`` on each stage."""
    if action.kind == FORWARD:
        return stage == 0 or action in done[stage - 1]
    behind = stage == len(done) - 1 or action in done[stage + 1]
    return behind and Action(FORWARD, action.micro_batch) in done[stage]


def verify(schedule: Schedule) -> None:
    """Prove that every stage sees the same micro-batches and that none waits for ever.

    Raises ``ScheduleError`` naming a missing or repeated action, or each stage's waiting action.
    """
    _check_complete(schedule)
    done: list[set[Action]] = [set() for _ in schedule]
    places = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule):
            while places[stage] < len(actions) and ready(actions[places[stage]], stage, done):
                done[stage].add(actions[places[stage]])
                places[stage] += 1
                progress = True
    waiting = [
        f"stage {stage} before {actions[place]}"
        for stage, (actions, place) in enumerate(zip(schedule, places, strict=True))
        if place < len(actions)
    ]
    if waiting:
        raise ScheduleError(f"deadlock: {', '.join(waiting)}")


def render(schedule: Schedule) -> str:
    """A line per stage, a column per time slot of one action each; ``·`` where a stage is idle."""
    verify(schedule)
    done: list[set[Action]] = [set() for _ in schedule]
    places = [0] * len(schedule)
    rows: list[list[str]] = [[] for _ in schedule]
    while any(place < len(actions) for place, actions in zip(places, schedule, strict=True)):
        slot = [
            actions[place] if place < len(actions) and ready(actions[place], stage, done) else None
            for stage, (place, actions) in enumerate(zip(places, schedule, strict=True))
        ]
        for stage, action in enumerate(slot):
            rows[stage].append("·" if action is None else str(action))
            if action is not None:
                done[stage].add(action)
                places[stage] += 1
    width = max(len(cell) for row in rows for cell in row)
    names = [f"segment {stage}" for stage in range(len(schedule) - 1)] + ["head"]
    label = max(map(len, names))
    return "\n".join(
        f"{name:<{label}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for name, row in zip(names, rows, strict=True)
    )


def _alternate(ahead: int, num_micro_batches: int) -> tuple[Action, ...]:
    """``ahead`` forwards first, then forward and backward in turn."""
    actions = []
    for place in range(num_micro_batches + ahead):
        if place < num_micro_batches:
            actions.append(Action(FORWARD, place))
        if ahead <= place:
            actions.append(Action(BACKWARD, place - ahead))
    return tuple(actions)


def _check_complete(schedule: Schedule) -> None:
    micro_batches = {action.micro_batch for actions in schedule for action in actions}
    wanted = [Action(kind, each) for each in micro_batches for kind in (FORWARD, BACKWARD)]
    for stage, actions in enumerate(schedule):
        for action in wanted:
            if (count := actions.count(action)) != 1:
                raise ScheduleError(f"stage {stage} has {action} {count} times, not once")
