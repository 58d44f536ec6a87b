"""The pipeline of one cluster for one round: segments from a plan, batches in, weights out."""

from collections.abc import Sequence

from collapipe.batch import Batch
from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part, clip_scale
from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors
from pipeline import schedule
from pipeline.head import HeadStage
from pipeline.inline import run_inline
from pipeline.micro_batch import split
from pipeline.segment import Segment
from pipeline.stage import EmbeddingStage, LastStage, SegmentStage
from pipeline.timer import PhaseTimer


class Pipeline:
    """Runs a plan's segments, from the embedding to the head, on the inline transport.

    ``blocks`` are the encoder's L parts in order; the plan says which segment holds which. Raises
    ``ConfigError`` for a plan that does not place every block.
    """

    def __init__(
        self, plan: ClusterPlan, embedding: Part, blocks: Sequence[Part], head: HeadStage
    ) -> None:
        check_covers(plan, len(blocks))
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
        inputs = [(each.inputs, each.mask) for each in micro_batches]
        embedding = EmbeddingStage(self._embedding, key, inputs, self.timer)
        segments = [SegmentStage(segment, key, self.timer) for segment in self.segments]
        head = LastStage(self._head, self.timer)
        self._head.begin(key, micro_batches, batch.num_targets)
        first, *others = schedule.build(self._plan.schedule, len(segments), len(micro_batches))
        run_inline((first, first, *others), (embedding, *segments), head)
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


def check_covers(plan: ClusterPlan, num_blocks: int) -> None:
    """Raise ``ConfigError`` for a plan that does not place every block."""
    covered = sum(segment.span.blocks for segment in plan.segments)
    if covered != num_blocks:
        raise ConfigError(
            f"unit {plan.unit}: the plan's segments hold {covered} of {num_blocks} blocks; "
            "a plan must place every block"
        )
