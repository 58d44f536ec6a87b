"""The pipeline of one cluster for one round: it trains embedding, segments and head on batches."""

from dataclasses import dataclass
from typing import Protocol

from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, clip_scale
from collapipe.tensors import Batch, Tensors
from pipeline.head import PipelineHead, TrainedParts
from pipeline.micro_batch import split
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import Segment
from pipeline.stage import EmbeddingStage, FirstStage, HeadStage, LastStage, Shapes


class Segments(TrainedParts, Protocol):
    """The encoder's segments, in this process or on devices."""

    def run(self, embedding: FirstStage, head: LastStage, key: DropoutKey, shapes: Shapes) -> None:
        """Run forward and backward of a batch from the ``embedding`` through all segments to the
        ``head``; ``shapes`` are those of the micro-batches' masks."""

    def squared_norms(self) -> list[float]:
        """Squared L2 norm of each block's gradient, in the blocks' order."""


@dataclass
class Pipeline:
    """Trains embedding, segments and head together, batch by batch, in m micro-batches."""

    num_micro_batches: int
    embedding: Part
    segments: Segments
    head: PipelineHead
    timer: PhaseTimer

    def __post_init__(self) -> None:
        self._first = Segment([self.embedding])

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self._first.forget()
        self.segments.forget()
        self.head.forget()

    def run(self, batch: Batch, key: DropoutKey) -> float:
        """Run forward and backward of a batch. Returns the mean loss per target token."""
        micro_batches = split(batch, self.num_micro_batches)
        inputs = [(each.inputs, each.mask) for each in micro_batches]
        embedding = EmbeddingStage(self._first, key, inputs, self.timer)
        head = HeadStage(self.head, self.timer)
        self.head.begin(key, micro_batches, batch.num_targets)
        shapes = [(each.num_samples, each.mask.shape[1]) for each in micro_batches]
        self.segments.run(embedding, head, key, shapes)
        return head.loss

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Step every part and the head, clipped by the global norm over all of them. Returns the
        squared global norm before clipping."""
        with self.timer.phase("norms"):
            own = [self.embedding.squared_norm(), *self.segments.squared_norms()]
            clip_scale(own, clip_norm)  # raises before a non-finite norm is sent to the head
            norms = [*own, *self.head.exchange_norms(own)]
        with self.timer.phase("step"):
            scale = clip_scale(norms, clip_norm)
            self.embedding.step(rate, scale)
            self.segments.step(rate, scale)
            self.head.step(rate, scale)
        return sum(norms)

    def weights(self) -> Tensors:
        """Weights of all parts on this unit by their names in the whole model."""
        return self.embedding.weights() | self.segments.weights() | self.head.weights()

    def optimizer_state(self) -> Tensors:
        """Optimiser state of the same parts, by the same names."""
        blocks = self.segments.optimizer_state()
        return self.embedding.optimizer_state() | blocks | self.head.optimizer_state()
