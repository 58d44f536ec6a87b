"""The inline transport: all segments run in the control unit's thread and share tensors in
memory."""

from collections.abc import Sequence

from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part
from collapipe.models.weights.kept import compute_dtype
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.state import HopPrecision
from collapipe.tensors import Tensors
from pipeline import schedule
from pipeline.engine import Pipeline
from pipeline.head import PipelineHead
from pipeline.hop_codec import HopCodec
from pipeline.interleave import StageRun, head_runs, interleave
from pipeline.phase_timer import PhaseTimer
from pipeline.schedule import FORWARD, Action
from pipeline.segment import Segment, SharedSegment, first_trained
from pipeline.stage import LastStage, Passed, SegmentStage, Shapes, Stage

_Box = dict[Action, Passed]


def inline_pipeline(
    plan: ClusterPlan,
    embedding: Part,
    blocks: Sequence[Part],
    head: PipelineHead,
    recompute: bool = False,
    wire_dtype: HopPrecision = "float32",
) -> Pipeline:
    """A cluster's pipeline in one thread; see ``InlineSegments``."""
    timer = PhaseTimer()
    segments = InlineSegments(plan, blocks, timer, recompute, wire_dtype, embedding.trains)
    return Pipeline(plan.num_micro_batches, embedding, segments, head, timer)


class InlineSegments:
    """A plan's segments of ``blocks``, the encoder's L parts in order.

    Tensors between stages are rounded to ``wire_dtype``, as if they were sent over a network.

    Raises ``ConfigError`` if the plan does not place every block.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        blocks: Sequence[Part],
        timer: PhaseTimer,
        recompute: bool,
        wire_dtype: HopPrecision,
        trained_embedding: bool,
    ) -> None:
        covered = sum(segment.span.blocks for segment in plan.segments)
        if covered != len(blocks):
            raise ConfigError(
                f"unit {plan.unit}: the plan's segments hold {covered} of {len(blocks)} blocks; "
                "a plan must place every block"
            )
        self._blocks, self._schedule, self._timer = blocks, plan.schedule, timer
        self._codec = HopCodec(wire_dtype, compute_dtype(blocks[0].module))
        first = first_trained(trained_embedding, (block.trains for block in blocks))
        self.segments = [
            _segment(each, blocks, recompute, first < each.span.first) for each in plan.segments
        ]

    def run(self, embedding: Stage, head: LastStage, key: DropoutKey, shapes: Shapes) -> None:
        segments = [SegmentStage(segment, key, self._timer) for segment in self.segments]
        shape = self._schedule, len(segments), len(shapes)
        first, lists = schedule.embedding(*shape), schedule.build(*shape)
        boxes: list[_Box] = [{} for _ in range(len(segments) + 2)]
        boxes[0] |= {action: () for action in first if action.kind == FORWARD}  # needs no input
        outside: _Box = {}  # for outputs before the embedding and after the head
        around = zip(boxes, [outside, *boxes], [*boxes[1:], outside], strict=False)
        ports = [_Boxes(*each, self._codec) for each in around]
        before = map(StageRun, (first, *lists[:-1]), (embedding, *segments), ports)
        interleave([*before, *head_runs(lists[-1], head, ports[-1])])
        for segment in self.segments:
            if isinstance(segment, SharedSegment):
                segment.add_up()

    def squared_norms(self) -> list[float]:
        return [block.squared_norm() for block in self._blocks]

    def step(self, rate: float, scale: float) -> None:
        for block in self._blocks:
            block.step(rate, scale)

    def weights(self) -> Tensors:
        return {k: v for block in self._blocks for k, v in block.weights().items()}

    def optimizer_state(self) -> Tensors:
        return {k: v for block in self._blocks for k, v in block.optimizer_state().items()}

    def forget(self) -> None:
        for segment in self.segments:
            segment.forget()


def _segment(
    plan: SegmentPlan, blocks: Sequence[Part], recompute: bool, input_gradient: bool
) -> Segment | SharedSegment:
    parts, recompute = blocks[plan.span.first : plan.span.stop], recompute or bool(plan.recomputing)
    if plan.shares:
        return SharedSegment(plan.rows, parts, recompute, input_gradient)
    return Segment(parts, recompute, input_gradient)


class _Boxes:
    """Ports of a stage: it takes its inputs from one box, and puts outputs in its neighbours'
    boxes."""

    def __init__(self, own: _Box, before: _Box, after: _Box, codec: HopCodec) -> None:
        self._own, self._before, self._after, self._codec = own, before, after, codec

    def holds(self, action: Action) -> bool:
        return action in self._own

    def receive(self, action: Action) -> Passed:
        return self._own.pop(action)

    def send(self, action: Action, made: Passed) -> None:
        box = self._after if action.kind == FORWARD else self._before
        box[action] = self._codec.hop(made)
