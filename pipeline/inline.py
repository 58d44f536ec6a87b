"""The inline transport: all stages of a batch in one thread, tensors handed over in boxes."""

from collections.abc import Sequence

from collapipe import cancellation
from pipeline.schedule import FORWARD, Action, Schedule
from pipeline.stage import LastStage, Passed, Stage, run_stage

_Box = dict[Action, Passed]


class _Boxes:
    """Ports of a stage: it takes from one box, and puts into its neighbours'."""

    def __init__(self, own: _Box, before: _Box, behind: _Box) -> None:
        self._own, self._before, self._behind = own, before, behind

    def holds(self, action: Action) -> bool:
        return action in self._own

    def receive(self, action: Action) -> Passed:
        return self._own.pop(action)

    def send(self, action: Action, made: Passed) -> None:
        (self._behind if action.kind == FORWARD else self._before)[action] = made


class _Answers(_Boxes):
    """Ports of the head's backwards, which need its answer."""

    def __init__(self, before: _Box, last: LastStage) -> None:
        super().__init__({}, before, {})
        self._last = last

    def holds(self, action: Action) -> bool:
        return self._last.ready(action)

    def receive(self, action: Action) -> Passed:
        return ()


def run_inline(actions: Schedule, stages: Sequence[Stage], last: LastStage) -> None:
    """Run every action of ``stages`` and of the ``last`` one behind them once.

    The stage nearest to the head goes first, so that activations leave for the decoder as early as
    the schedule allows, and segments compute while the decoder does; nor do they wait there for its
    answers to those before them. Raises ``CancelledRoundError`` between two actions when asked to.
    """
    outside: _Box = {}  # in front of the first stage
    boxes: list[_Box] = [{} for _ in actions]
    # The first stage's forwards wait for no other.
    boxes[0] |= {action: () for action in actions[0] if action.kind == FORWARD}
    befores, behinds = [outside, *boxes], [*boxes[1:], outside]
    ports: list[_Boxes] = [_Boxes(*each) for each in zip(boxes, befores, behinds, strict=False)]
    lists = [*actions[:-1], [each for each in actions[-1] if each.kind == FORWARD]]
    runs = [run_stage(*each) for each in zip(lists, (*stages, last), ports, strict=True)]
    ports.append(_Answers(boxes[-2], last))
    answers = [each for each in actions[-1] if each.kind != FORWARD]
    runs.append(run_stage(answers, last, ports[-1]))
    waiting = {place: action for place, run in enumerate(runs) if (action := next(run, None))}
    while waiting:
        cancellation.check()
        able = (place for place in reversed(range(len(runs))) if place in waiting)
        able = (place for place in able if ports[place].holds(waiting[place]))
        # If none can, nothing is left but to wait for the head's answer.
        place = next(able, len(runs) - 1)
        action = next(runs[place], None)
        if action is None:
            del waiting[place]
        else:
            waiting[place] = action
