"""A stage runs its list of actions in order; ports carry its tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from collapipe.models.dropout import DropoutKey
from collapipe.models.split import masks_for
from pipeline.head import PipelineHead
from pipeline.phase_timer import PhaseTimer
from pipeline.schedule import BACKWARD, FORWARD, Action
from pipeline.segment import Segment, SharedSegment

Passed = tuple[Tensor, ...]
"""Tensors between stages: (activation [b, s, d], mask [b, s]) forward, (gradient [b, s, d],)
backward; empty if no tensor is passed, such as a gradient that no part before needs."""
Shapes = Sequence[tuple[int, int]]
"""The shape [b, s] of each micro-batch's mask: its rows and its positions."""


class Stage(Protocol):
    """Computes the actions of a stage."""

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        """Return the input of the next stage."""

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        """Return the input of the previous stage's backward."""


class FirstStage(Stage, Protocol):
    """The stage before the first segment."""

    def forget(self) -> None:
        """Drop the activations and gradients of an aborted step."""


class LastStage(Stage, Protocol):
    """The stage after the last segment: forward submits, backward waits for the gradient."""

    def ready(self, action: Action) -> bool:
        """Whether ``action`` would return without waiting for the answer."""


class Ports(Protocol):
    """Inputs and outputs of a stage's actions."""

    def holds(self, action: Action) -> bool:
        """Whether ``receive`` would return at once."""

    def receive(self, action: Action) -> Passed:
        """Wait for the input of ``action`` and return it."""

    def send(self, action: Action, made: Passed) -> None:
        """Send the output of ``action``; does not wait."""


def run_stage(actions: Sequence[Action], stage: Stage, ports: Ports) -> Iterator[Action]:
    """Run ``actions`` in order; yield each one before it runs.

    A caller with several stages in one thread resumes a stage whose ports hold the action's input.
    A caller with one stage resumes at once and blocks in ``Ports.receive``.
    """
    for action in actions:
        yield action
        run = stage.forward if action.kind == FORWARD else stage.backward
        ports.send(action, run(action.micro_batch, ports.receive(action)))


@dataclass(frozen=True, slots=True)
class EmbeddingStage:
    """The control unit's embedding, before the first segment."""

    segment: Segment
    key: DropoutKey
    inputs: Sequence[Passed]  # token ids [b, s] and mask [b, s] of each micro-batch
    timer: PhaseTimer

    def forget(self) -> None:
        self.segment.forget()

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        ids, mask = self.inputs[micro_batch]
        with self.timer.phase("embedding"):
            masks = masks_for(self.segment.parts[0].module, mask)
            return self.segment.forward(micro_batch, ids, self.key, *masks), mask

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        with self.timer.phase("embedding"):
            self.segment.backward(micro_batch, *received)
        return ()


@dataclass(frozen=True)
class SegmentStage:
    """A segment of the encoder."""

    segment: Segment | SharedSegment
    key: DropoutKey
    timer: PhaseTimer

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        activation, mask = received
        with self.timer.phase("forward"):
            return self.segment.forward(micro_batch, activation, self.key, mask), mask

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        with self.timer.phase("backward"):
            gradient = self.segment.backward(micro_batch, *received)
        return () if gradient is None else (gradient,)


@dataclass(slots=True)
class HeadStage:
    """The head, after the last segment. ``loss`` adds up the micro-batches' losses."""

    head: PipelineHead
    timer: PhaseTimer
    loss: float = 0.0

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        activation, _ = received
        with self.timer.phase("head"):
            self.head.submit(micro_batch, activation)
        return ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        with self.timer.phase("head"):
            loss, gradient = self.head.answer(micro_batch)
        self.loss += loss
        return (gradient,)

    def ready(self, action: Action) -> bool:
        return action.kind != BACKWARD or self.head.ready(action.micro_batch)
