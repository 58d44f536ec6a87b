"""The pipeline of one cluster for one round: segments from a plan, batches in, weights out."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, clip_scale
from collapipe.models.split import masks_for
from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors
from pipeline import schedule
from pipeline.head import HeadStage
from pipeline.micro_batch import split
from pipeline.schedule import BACKWARD, FORWARD, Action, Schedule
from pipeline.segment import Segment


class PhaseTimer:
    """Adds up the seconds spent inside ``timer.phase(name)``."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


@dataclass
class _BatchStep:
    """What the stages share while one batch passes them."""

    key: DropoutKey
    micro_batches: Sequence[Batch]
    timer: PhaseTimer


@dataclass
class _SegmentStage:
    """A segment; the first one has the control unit's embedding before it, and gets None to go
    forward. ``ready``: whether an action would run without waiting for another machine."""

    segment: Segment
    step: _BatchStep
    embedding: Segment | None = None

    def forward(self, micro_batch: int, activation: Tensor | None) -> Tensor:
        step, batch = self.step, self.step.micro_batches[micro_batch]
        if self.embedding is not None:
            with step.timer.phase("embedding"):
                masks = masks_for(self.embedding.parts[0].module, batch.mask)
                activation = self.embedding.forward(micro_batch, batch.inputs, step.key, *masks)
        assert activation is not None
        with step.timer.phase("forward"):
            return self.segment.forward(micro_batch, activation, step.key, batch.mask)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        assert gradient is not None
        with self.step.timer.phase("backward"):
            sent = self.segment.backward(micro_batch, gradient)
        if self.embedding is None:
            return sent
        assert sent is not None
        with self.step.timer.phase("embedding"):
            return self.embedding.backward(micro_batch, sent)

    def ready(self, action: Action) -> bool:
        return True


@dataclass
class _LastStage:
    """The head; forward hands over, backward gets None and waits for the answer."""

    head: HeadStage
    step: _BatchStep
    loss: float = 0.0

    def forward(self, micro_batch: int, activation: Tensor | None) -> None:
        assert activation is not None
        with self.step.timer.phase("head"):
            self.head.submit(micro_batch, activation)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        with self.step.timer.phase("head"):
            loss, answered = self.head.answer(micro_batch)
        self.loss += loss
        return answered

    def ready(self, action: Action) -> bool:
        return action.kind != BACKWARD or self.head.ready(action.micro_batch)


_Stage = _SegmentStage | _LastStage


class Pipeline:
    """Runs a plan's segments, from the embedding to the head, on the inline transport.

    ``blocks`` are the encoder's L parts in order; the plan says which segment holds which. Raises
    ``ConfigError`` for a plan that does not place every block.
    """

    def __init__(
        self, plan: ClusterPlan, embedding: Part, blocks: Sequence[Part], head: HeadStage
    ) -> None:
        covered = sum(segment.span.blocks for segment in plan.segments)
        if covered != len(blocks):
            raise ConfigError(
                f"unit {plan.unit}: the plan's segments hold {covered} of {len(blocks)} blocks; "
                "a plan must place every block"
            )
        self._plan, self._head = plan, head
        self._parts = [embedding, *blocks]
        self._embedding = Segment([embedding])
        self.segments = [
            Segment([blocks[index] for index in segment.span.indices()])
            for segment in plan.segments
        ]
        self.timer = PhaseTimer()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        for segment in (self._embedding, *self.segments):
            segment.forget()
        self._head.forget()

    def run(self, batch: Batch, key: DropoutKey) -> float:
        """Forward and backward of a batch; its loss, a sum over target tokens divided by them."""
        micro_batches = split(batch, self._plan.num_micro_batches)
        step = _BatchStep(key, micro_batches, self.timer)
        head = _LastStage(self._head, step)
        first, *others = self.segments
        front = [_SegmentStage(first, step, self._embedding)]
        stages: list[_Stage] = [*front, *(_SegmentStage(segment, step) for segment in others), head]
        self._head.begin(key, micro_batches, batch.num_targets)
        actions = schedule.build(self._plan.schedule, len(self.segments), len(micro_batches))
        _run_inline(actions, stages)
        return head.loss

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Step every part and the head, clipped by the global norm over all of them; its square,
        before it was clipped."""
        with self.timer.phase("norms"):
            own = [part.squared_norm() for part in self._parts]
            clip_scale(own, clip_norm)  # before a norm that is not finite is sent to the head
            norms = [*own, *self._head.exchange_norms(own)]
        with self.timer.phase("step"):
            scale = clip_scale(norms, clip_norm)
            for part in self._parts:
                part.step(rate, scale)
            self._head.step(rate, scale)
        return sum(norms)

    def weights(self) -> Tensors:
        """Weights of embedding and blocks by their names in the whole model."""
        return {k: v for part in self._parts for k, v in part.weights().items()}

    def optimizer_state(self) -> Tensors:
        """Optimiser state of embedding and blocks, by the same names."""
        return {k: v for part in self._parts for k, v in part.optimizer_state().items()}


def _run_inline(actions: Schedule, stages: Sequence[_Stage]) -> None:
    """Run every action once, all stages in one thread.

    A tensor that a device would send is put into a box; an action can run when what it needs is
    there. The stage nearest to the head goes first, so that activations leave for the decoder as
    early as the schedule allows, and segments compute while the decoder does. Raises
    ``CancelledRoundError`` between two actions when asked to.
    """
    pending = [deque(each) for each in actions]
    boxes: list[dict[Action, Tensor | None]] = [{} for _ in stages]
    # The first stage's forwards and the last one's backwards wait for no other stage.
    boxes[0] |= {action: None for action in actions[0] if action.kind == FORWARD}
    boxes[-1] |= {action: None for action in actions[-1] if action.kind == BACKWARD}
    while any(pending):
        cancellation.check()
        able = [s for s in reversed(range(len(stages))) if pending[s] and pending[s][0] in boxes[s]]
        # If none is ready, nothing is left but to wait for the head's answer.
        stage = next((s for s in able if stages[s].ready(pending[s][0])), able[-1])
        action = pending[stage].popleft()
        received = boxes[stage].pop(action)
        forward = action.kind == FORWARD
        run = stages[stage].forward if forward else stages[stage].backward
        sent = run(action.micro_batch, received)
        neighbour = stage + 1 if forward else stage - 1
        if 0 <= neighbour < len(stages):
            boxes[neighbour][action] = sent
