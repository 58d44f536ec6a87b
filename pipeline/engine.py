"""The pipeline of one cluster for one round: segments from a plan, batches in, weights out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from collapipe.batch import Batch
from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, clip_scale
from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors
from collapipe.timing import PhaseTimer
from pipeline import schedule
from pipeline.head import HeadStage
from pipeline.inline import PipelineStage, run_inline
from pipeline.micro_batch import split
from pipeline.schedule import BACKWARD, Action
from pipeline.segment import Segment


@dataclass
class _BatchStep:
    """What the stages share while one batch passes them."""

    key: DropoutKey
    micro_batches: Sequence[Batch]
    timer: PhaseTimer


@dataclass
class _SegmentStage:
    """A segment; the first one has the control unit's embedding before it."""

    segment: Segment
    step: _BatchStep
    embedding: Segment | None = None

    def forward(self, micro_batch: int, activation: Tensor | None) -> Tensor:
        step, batch = self.step, self.step.micro_batches[micro_batch]
        if self.embedding is not None:
            with step.timer.phase("embedding"):
                activation = self.embedding.forward(micro_batch, batch.inputs, step.key)
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
    """The head; forward hands over, backward waits for the answer."""

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


class Pipeline:
    """Runs a plan's segments, from the embedding to the head, on the inline transport.

    Parameters
    ----------
    embedding
        The control unit's part.
    blocks
        The encoder's L parts in order; the plan says which segment holds which.
    head
        What answers the last segment's activations.

    Raises ``ConfigError`` for a plan that does not place every block.
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
        stages: list[PipelineStage] = [
            _SegmentStage(first, step, self._embedding),
            *(_SegmentStage(segment, step) for segment in others),
            head,
        ]
        self._head.begin(key, micro_batches, batch.num_targets)
        actions = schedule.build(self._plan.schedule, len(self.segments), len(micro_batches))
        run_inline(actions, stages)
        return head.loss

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Step every part and the head, clipped by the global norm over all of them; its square,
        before it was clipped."""
        with self.timer.phase("norms"):
            own = [part.squared_norm() for part in self._parts]
            clip_scale(own, clip_norm)  # before the head hears of a norm that is not finite
            norms = [*own, *self._head.exchange_norms(own)]
        with self.timer.phase("step"):
            scale = clip_scale(norms, clip_norm)
            for part in self._parts:
                part.step(rate, scale)
            self._head.step(rate, scale)
        return sum(norms)

    def weights(self) -> Tensors:
        """Weights of embedding and blocks by their names in the whole model."""
        return _union([part.weights() for part in self._parts])

    def optimizer_state(self) -> Tensors:
        """Optimiser state of embedding and blocks, by the same names."""
        return _union([part.optimizer_state() for part in self._parts])


def _union(tensors: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: tensor for each in tensors for name, tensor in each.items()}
