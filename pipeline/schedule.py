"""A schedule is data: a list of actions per stage, which can be checked and counted.

Stages 0 … S − 1 are the segments, stage S is the head (a local head, or the server's decoder).
``F2`` on a stage depends on ``F2`` of the previous stage; ``B2`` depends on ``B2`` of the next
stage and on the stage's own ``F2``. Gradients always accumulate in the order of micro-batches, so
all schedules give the same bits.
"""

import functools
import itertools
from collections import Counter, deque
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
    """Return GPipe (Huang et al. 2019): all forwards, then all backwards; a segment keeps m
    micro-batches."""
    segment = alternate(num_micro_batches, num_micro_batches)
    return (*((segment,) * num_segments), alternate(0, num_micro_batches))


def one_f_one_b(num_segments: int, num_micro_batches: int) -> Schedule:
    """Return 1F1B (Narayanan et al. 2019): forwards and backwards alternate; segment s keeps at
    most S + 1 − s micro-batches."""
    return tuple(
        alternate(num_segments - stage, num_micro_batches) for stage in range(num_segments + 1)
    )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}


@functools.lru_cache(maxsize=8)  # a batch may have fewer micro-batches than others
def build(name: str, num_segments: int, num_micro_batches: int) -> Schedule:
    """Build and verify the schedule ``name``. Raises ``ConfigError`` if the name is unknown."""
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule={name}: must be one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name](num_segments, num_micro_batches)
    verify(schedule)
    return schedule


def kept(name: str, num_segments: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return of how many micro-batches each segment keeps tensors at most."""
    lists = build(name, num_segments, num_micro_batches)[:-1]
    steps = ((1 if each.kind == FORWARD else -1 for each in actions) for actions in lists)
    return tuple(max(itertools.accumulate(each)) for each in steps)


def embedding(name: str, num_segments: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of the stage before the first segment, as if it were one more segment. So
    it is one micro-batch ahead, and no segment waits for a gradient's way back."""
    return build(name, num_segments + 1, num_micro_batches)[0]


def ready(action: Action, stage: int, done: list[set[Action]]) -> bool:
    """Whether all actions on which ``action`` depends are ``done``; ``done`` has a set per
    stage."""
    if action.kind == FORWARD:
        return stage == 0 or action in done[stage - 1]
    next_done = stage == len(done) - 1 or action in done[stage + 1]
    return next_done and Action(FORWARD, action.micro_batch) in done[stage]


def verify(schedule: Schedule) -> None:
    """Check that every stage has the same micro-batches, that no stage waits forever, and that
    gradients accumulate in the order of micro-batches.

    Raises ``ScheduleError`` for an unknown, missing or repeated action, for two actions in the
    wrong order, or for a deadlock.
    """
    _check_complete(schedule)
    _check_order(schedule)
    done: list[set[Action]] = [set() for _ in schedule]
    pending = [deque(actions) for actions in schedule]
    while able := [s for s, each in enumerate(pending) if each and ready(each[0], s, done)]:
        for stage in able:
            done[stage].add(pending[stage].popleft())
    waiting = [f"stage {stage} before {each[0]}" for stage, each in enumerate(pending) if each]
    if waiting:
        raise ScheduleError(f"deadlock: {', '.join(waiting)}")


def alternate(ahead: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return ``ahead`` forwards, followed by forwards and backwards in turn."""
    actions = []
    for place in range(num_micro_batches + ahead):
        if place < num_micro_batches:
            actions.append(Action(FORWARD, place))
        if ahead <= place:
            actions.append(Action(BACKWARD, place - ahead))
    return tuple(actions)


def _check_order(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule):
        backward = (each for each in actions if each.kind == BACKWARD)
        for before, action in itertools.pairwise(backward):
            if action.micro_batch < before.micro_batch:
                raise ScheduleError(
                    f"stage {stage} has {action} after {before}; gradients must add up in the "
                    "order of micro-batches"
                )


def _check_complete(schedule: Schedule) -> None:
    micro_batches = {action.micro_batch for actions in schedule for action in actions}
    kinds = FORWARD, BACKWARD
    for stage, actions in enumerate(schedule):
        if unknown := next((each for each in actions if each.kind not in kinds), None):
            raise ScheduleError(f"stage {stage} has {unknown}; expected {' or '.join(kinds)}")
        counts = Counter(actions)
        for action in (Action(kind, each) for each in micro_batches for kind in kinds):
            if (count := counts[action]) != 1:
                raise ScheduleError(f"stage {stage} has {action} {count} times, not once")
