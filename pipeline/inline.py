"""The inline transport: all stages of a pipeline in one thread, one action at a time.

A tensor that a device would send is put into a box; an action can run when what it needs is there.
The stage nearest to the head goes first, so that activations leave for the decoder as early as the
schedule allows, and segments compute while the decoder does.
"""

from collections import deque
from typing import Protocol

from torch import Tensor

from collapipe import cancellation
from pipeline.schedule import FORWARD, Action, Schedule


class PipelineStage(Protocol):
    """What an action runs on. The first stage gets None to go forward, the last to go back."""

    def forward(self, micro_batch: int, activation: Tensor | None) -> Tensor | None:
        """Activation for the stage behind."""

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Gradient for the stage before."""

    def ready(self, action: Action) -> bool:
        """Whether the action would run without waiting for another machine."""


def run_inline(schedule: Schedule, stages: list[PipelineStage]) -> None:
    """Run every action once. Raises ``CancelledRoundError`` between two of them when asked to."""
    pending = [deque(actions) for actions in schedule]
    boxes: list[dict[Action, Tensor | None]] = [{} for _ in stages]
    last = len(stages) - 1

    def has_input(stage: int, action: Action) -> bool:
        edge = 0 if action.kind == FORWARD else last
        return stage == edge or action in boxes[stage]

    def next_stage() -> int:
        waiting = last
        for stage in reversed(range(len(stages))):
            if pending[stage] and has_input(stage, pending[stage][0]):
                if stages[stage].ready(pending[stage][0]):
                    return stage
                waiting = stage
        return waiting  # nothing else to do: its action waits for the head's answer

    while any(pending):
        cancellation.check()
        stage = next_stage()
        action = pending[stage].popleft()
        received = boxes[stage].pop(action, None)
        forward = action.kind == FORWARD
        run = stages[stage].forward if forward else stages[stage].backward
        sent = run(action.micro_batch, received)
        neighbour = stage + 1 if forward else stage - 1
        if 0 <= neighbour <= last:
            boxes[neighbour][action] = sent
