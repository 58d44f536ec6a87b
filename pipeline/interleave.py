"""Run several stages in one thread: the last stage with a ready action goes first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collapipe.process import cancellation
from pipeline.schedule import FORWARD, Action
from pipeline.stage import LastStage, Passed, Ports, Stage, run_stage


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage, its list of actions, and the ports of its tensors."""

    actions: Sequence[Action]
    stage: Stage
    ports: Ports


class _Answers:
    """Ports of the head's backward actions, which need the head's answer but no received
    tensors."""

    def __init__(self, last: LastStage, ports: Ports) -> None:
        self._last, self.send = last, ports.send

    def holds(self, action: Action) -> bool:
        return self._last.ready(action)

    def receive(self, action: Action) -> Passed:
        return ()


def head_runs(actions: Sequence[Action], last: LastStage, ports: Ports) -> tuple[StageRun, ...]:
    """Return separate runs of the head's forward and backward actions.

    Activations are then sent to a decoder without waiting for its earlier answers.
    """
    forwards = [action for action in actions if action.kind == FORWARD]
    backwards = [action for action in actions if action.kind != FORWARD]
    return StageRun(forwards, last, ports), StageRun(backwards, last, _Answers(last, ports))


def interleave(runs: Sequence[StageRun], idle: Callable[[], None] | None = None) -> None:
    """Run all actions of all ``runs``; of several ready runs the last one continues.

    If no run is ready, ``idle`` blocks until input arrives; without ``idle`` the last run continues
    and blocks on its own input. Raises ``CancelledRoundError`` between two actions after
    cancellation.
    """
    steps = [run_stage(each.actions, each.stage, each.ports) for each in runs]
    waiting = {place: action for place, step in enumerate(steps) if (action := next(step, None))}
    while waiting:
        cancellation.check()
        able = (p for p in sorted(waiting, reverse=True) if runs[p].ports.holds(waiting[p]))
        place = next(able, None)
        if place is None:
            if idle is not None:
                idle()
                continue
            place = max(waiting)
        action = next(steps[place], None)
        if action is None:
            del waiting[place]
        else:
            waiting[place] = action
