"""For each cut of the model, the pipeline has the loss and gradients of the unsplit model."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count

import pytest
import torch
from device_cluster import ADAMW, VOCABULARY, NumberedKey, ragged
from sections import optimizer_settings
from split_parts import model_of, parts_of, segments_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from collapipe.errors import CancelledRoundError, ConfigError, NonFiniteLossError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart
from collapipe.models.split import SplitModel
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.process.cancellation import Cancellation, cancellable
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Batch, Tensors
from pipeline.engine import Pipeline
from pipeline.head import Answer, LocalHead
from pipeline.inline import InlineSegments, inline_pipeline
from pipeline.micro_batch import split as micro_batches_of
from pipeline.schedule import SCHEDULES, build
from pipeline.segment import Segment
from tests.thorough import chosen

NUM_BLOCKS, NUM_SAMPLES = 4, 5
CUTS = [
    tuple(stop - start for start, stop in zip((0, *inner), (*inner, NUM_BLOCKS), strict=True))
    for size in range(NUM_BLOCKS)
    for inner in combinations(range(1, NUM_BLOCKS), size)
]
each_m = pytest.mark.parametrize("num_micro_batches", chosen(range(1, NUM_SAMPLES + 1), (1, 2, 5)))
KEY = DropoutKey(seed=5, unit=1, step=7)
RATE = 0.01  # unlike the settings' rate: each step has its own
SGD = optimizer_settings("sgd", momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True)
class Cluster:
    """A pipeline with a local head, and all its parts as one model."""

    pipeline: Pipeline
    head: HeadPart
    model: SplitModel

    @property
    def segments(self) -> list[Segment]:
        """The segments of the inline transport."""
        inline = self.pipeline.segments
        assert isinstance(inline, InlineSegments)
        return inline.segments

    def train(self, batch: Batch, steps: Sequence[int], clip_norm: float | None) -> None:
        """Train ``steps`` on the same batch."""
        for step in steps:
            self.pipeline.run(batch, DropoutKey(KEY.seed, KEY.unit, step))
            self.pipeline.step(RATE, clip_norm)

    def weights(self) -> Tensors:
        """The weights of the whole model."""
        return self.pipeline.weights() | self.head.weights()

    def optimizer_state(self) -> Tensors:
        """The optimiser state of the whole model."""
        return self.pipeline.optimizer_state() | self.head.optimizer_state()


def transformer(norm: str = "pre", dropout: float = 0.0) -> TransformerSpec:
    """Four blocks, so that there are eight ways to cut them."""
    return TransformerSpec(NUM_BLOCKS, 1, 16, 2, 24, dropout, norm)


def fresh(spec: TransformerSpec, dtype: torch.dtype) -> SplitModel:
    """A model in training, with the same weights every time."""
    torch.manual_seed(3)
    return SplitModel(spec, VOCABULARY).to(dtype).train()


def plan_of(cut: Sequence[int], num_micro_batches: int, schedule: str) -> ClusterPlan:
    """A device for each of the cut's segments."""
    return ClusterPlan(KEY.unit, segments_of(cut), num_micro_batches, schedule)


def cluster(
    plan: ClusterPlan,
    spec: TransformerSpec,
    weights: Tensors,
    settings: OptimizerSettings = ADAMW,
    state: Tensors | None = None,
    head_of: Callable[[HeadPart], LocalHead] = LocalHead,
    recompute: bool = False,
) -> Cluster:
    """A cluster with copies of ``weights``."""
    model = model_of(spec, weights, VOCABULARY)
    embedding, blocks, head = parts_of(model, settings, state)
    pipeline = inline_pipeline(plan, embedding, blocks, head_of(head), recompute)
    return Cluster(pipeline, head, model)


def unsplit_loss(model: SplitModel, batch: Batch, step: int = KEY.step) -> float:
    """Forward and backward of the unsplit model, as the reference."""
    loss = model.loss(batch, DropoutKey(KEY.seed, KEY.unit, step)) / batch.num_targets
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; assert that none is missing."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    present = {name: gradient for name, gradient in found.items() if gradient is not None}
    assert present.keys() == found.keys()
    return present


def assert_same_bits(left: Tensors, right: Tensors) -> None:
    """Assert equal names and values."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_m
def test_split_equals_unsplit(schedule: str, num_micro_batches: int) -> None:
    """Loss and all gradients, for all cuts, pre-norm and post-norm; m may or may not divide b."""
    spec, batch = transformer(("pre", "post")[num_micro_batches % 2]), ragged()
    whole = fresh(spec, torch.float64)
    expected_loss = unsplit_loss(whole, batch)
    expected = gradients(whole)
    for cut in CUTS:
        split = cluster(plan_of(cut, num_micro_batches, schedule), spec, whole.state_dict())
        loss = split.pipeline.run(batch, KEY)
        assert loss == pytest.approx(expected_loss, rel=0, abs=1e-10)
        for name, gradient in gradients(split.model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_may_have_fewer_samples_than_micro_batches(schedule: str) -> None:
    """Then each sample is a micro-batch."""
    spec, batch = transformer(), ragged(2)
    whole = fresh(spec, torch.float64)
    split = cluster(plan_of((1, 3), 4, schedule), spec, whole.state_dict())
    assert split.pipeline.run(batch, KEY) == pytest.approx(unsplit_loss(whole, batch), abs=1e-10)
    for name, gradient in gradients(split.model).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], rtol=0, atol=1e-10, msg=name)


def test_dropout_does_not_depend_on_the_cut_or_the_schedule() -> None:
    """With the same micro-batches and seed, two clipped steps give the same bits."""
    spec, batch = transformer(dropout=0.3), ragged()
    start = fresh(spec, torch.float32).state_dict()
    results = []
    for cut in CUTS:
        for schedule in SCHEDULES if cut == (1, 3) else [next(iter(SCHEDULES))]:
            trained = cluster(plan_of(cut, 3, schedule), spec, start)
            trained.train(batch, (0, 1), clip_norm=0.1)
            results.append(trained.weights())
    assert not torch.equal(results[0]["head.norm.weight"], start["head.norm.weight"])
    for result in results[1:]:
        assert_same_bits(results[0], result)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_dropout_depends_on_the_step_and_the_micro_batch(num_micro_batches: int) -> None:
    """The pipeline drops what the unsplit model drops for each micro-batch with its own key."""
    spec, batch = transformer(dropout=0.3), ragged()
    losses = []
    for step in (0, 1):
        whole = fresh(spec, torch.float64)
        for number, micro_batch in enumerate(micro_batches_of(batch, num_micro_batches)):
            key = NumberedKey(KEY.seed, KEY.unit, step, number)
            (whole.loss(micro_batch, key) / batch.num_targets).backward()  # type: ignore[no-untyped-call]
            losses.append(whole.loss(micro_batch, key).item() / batch.num_targets)
        expected = pytest.approx(sum(losses[-num_micro_batches:]), rel=0, abs=1e-12)
        plan = plan_of((1, 3), num_micro_batches, "one_f_one_b")
        apart = cluster(plan, spec, whole.state_dict())
        assert apart.pipeline.run(batch, DropoutKey(KEY.seed, KEY.unit, step)) == expected
        for name, gradient in gradients(apart.model).items():
            theirs = gradients(whole)[name]
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-12, msg=name)
    assert len(set(losses)) == 2 * num_micro_batches


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=lambda settings: settings.name)
@pytest.mark.parametrize("clip_norm", [None, 0.1, 1e3])
def test_steps_of_parts_equal_steps_of_one_optimiser(
    settings: OptimizerSettings, clip_norm: float | None
) -> None:
    """Compare three steps with torch's optimiser and clipping over the whole model."""
    spec, batch = transformer(), ragged()
    whole = fresh(spec, torch.float64)
    split = cluster(plan_of((2, 1, 1), 2, "one_f_one_b"), spec, whole.state_dict(), settings)
    optimizer: torch.optim.Optimizer
    if settings.name == "sgd":
        optimizer = torch.optim.SGD(whole.parameters(), RATE, momentum=0.9, weight_decay=0.1)
    else:
        optimizer = torch.optim.AdamW(
            whole.parameters(), RATE, (0.9, 0.98), eps=1e-4, weight_decay=0.1
        )
    split.train(batch, range(3), clip_norm)
    for step in range(3):
        unsplit_loss(whole, batch, step)
        if clip_norm is not None:
            norm = clip_grad_norm_(whole.parameters(), clip_norm)
            assert (norm > clip_norm) == (clip_norm == 0.1)
        optimizer.step()
        optimizer.zero_grad()
    trained = split.weights()
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=lambda settings: settings.name)
def test_a_gradient_that_is_not_finite_changes_no_weight(settings: OptimizerSettings) -> None:
    """In the embedding, a block or the head; an optimiser would spread it to all weights."""
    spec, batch = transformer(), ragged()
    start = fresh(spec, torch.float32).state_dict()
    for name in ("embedding.tokens.weight", "blocks.2.attention.key.bias", "head.norm.weight"):
        split = cluster(plan_of((2, 2), 2, "gpipe"), spec, start, settings)
        split.pipeline.run(batch, KEY)
        gradient = gradients(split.model)[name]
        gradient.view(-1)[0] = torch.nan
        with pytest.raises(NonFiniteLossError):
            split.pipeline.step(RATE, None)
        assert_same_bits(split.weights(), start)
        assert split.optimizer_state() == {}


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=lambda settings: settings.name)
def test_optimiser_state_follows_its_block(settings: OptimizerSettings) -> None:
    """A run whose cut changes after each step has the bits of the run with one cut."""
    spec, batch = transformer(dropout=0.3), ragged()
    start = fresh(spec, torch.float32).state_dict()
    stayed = cluster(plan_of((1, 3), 3, "one_f_one_b"), spec, start, settings)
    stayed.train(batch, (0, 1, 2), clip_norm=0.1)
    weights, state = start, Tensors()
    for step, cut in enumerate([(1, 3), (2, 1, 1), (4,)]):
        moved = cluster(plan_of(cut, 3, "one_f_one_b"), spec, weights, settings, state)
        moved.train(batch, (step,), clip_norm=0.1)
        weights, state = moved.weights(), moved.optimizer_state()
        assert {name.partition("/")[0] for name in state} == weights.keys()
    assert_same_bits(stayed.weights(), weights)
    assert_same_bits(stayed.optimizer_state(), state)
    forgetful = cluster(plan_of((4,), 3, "one_f_one_b"), spec, start, settings)
    forgetful.train(batch, (0, 1), clip_norm=0.1)
    forgetful = cluster(plan_of((4,), 3, "one_f_one_b"), spec, forgetful.weights(), settings)
    forgetful.train(batch, (2,), clip_norm=0.1)
    name = "blocks.0.attention.value.weight"
    assert not torch.equal(forgetful.weights()[name], weights[name])


@pytest.mark.parametrize(
    ("cut", "num_micro_batches"),
    chosen(
        itertools.product(CUTS, range(1, NUM_SAMPLES + 1)),
        [*((cut, NUM_SAMPLES) for cut in CUTS), (CUTS[-1], 1), (CUTS[-1], 2), (CUTS[2], 2)],
    ),
    ids=str,
)
def test_a_segment_keeps_as_many_micro_batches_as_its_schedule_needs(
    cut: tuple[int, ...], num_micro_batches: int
) -> None:
    """GPipe keeps m; 1F1B keeps S + 1 − s on segment s; with recomputing one. The test counts live
    autograd graphs."""
    spec, batch, num_segments = transformer(), ragged(), len(cut)
    weights = fresh(spec, torch.float64).state_dict()
    expected = {
        "gpipe": [num_micro_batches] * num_segments,
        "one_f_one_b": [min(num_micro_batches, num_segments + 1 - s) for s in range(num_segments)],
    }
    assert expected.keys() == SCHEDULES.keys()
    for schedule, recompute in itertools.product(expected, (False, True)):
        peaks = [1] * num_segments if recompute else expected[schedule]
        plan = plan_of(cut, num_micro_batches, schedule)
        split = cluster(plan, spec, weights, recompute=recompute)
        counters = [_LiveOutputs(segment.parts[-1].module) for segment in split.segments]
        split.pipeline.run(batch, KEY)
        assert [counter.peak for counter in counters] == peaks


def test_only_the_segments_that_the_plan_lists_recompute() -> None:
    """Other segments keep their activations; recomputing changes no bit."""
    spec, batch, plan = transformer(), ragged(), plan_of((2, 2), 3, "gpipe")
    first, second = plan.segments
    one = replace(plan, segments=(first, replace(second, recomputing=(second.device,))))
    weights, made = fresh(spec, torch.float64).state_dict(), []
    for each, peaks in ((plan, [3, 3]), (one, [3, 1])):
        split = cluster(each, spec, weights)
        counters = [_LiveOutputs(segment.parts[-1].module) for segment in split.segments]
        split.pipeline.run(batch, KEY)
        assert [counter.peak for counter in counters] == peaks
        made.append(gradients(split.model))
    assert_same_bits(*made)


class _LiveOutputs:
    """Counts the live outputs of a module in training; ``peak`` is their maximum."""

    def __init__(self, module: nn.Module) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        self.peak = 0
        module.register_forward_hook(self._add)

    def _add(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._outputs.append(weakref.ref(output))
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """The number of outputs that are not yet freed."""
        return sum(output() is not None for output in self._outputs)


class _LoggingHead(LocalHead):
    """Logs its actions, and cancels the round at micro-batch ``at``."""

    def __init__(
        self, part: HeadPart, log: list[str], scope: Cancellation | None = None, at: int = 0
    ) -> None:
        super().__init__(part)
        self._log, self._scope, self._at = log, scope, at

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Compute and log; cancel at micro-batch ``at``."""
        super().submit(micro_batch, hidden)
        self._log.append(f"F{micro_batch}")
        if self._scope is not None and micro_batch == self._at:
            self._scope.cancel()

    def answer(self, micro_batch: int) -> Answer:
        """Log and answer."""
        self._log.append(f"B{micro_batch}")
        return super().answer(micro_batch)


def log_passes(module: nn.Module, log: list[str]) -> None:
    """Log each forward by its number, and its gradient when it is computed."""
    numbers = count()

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        number = next(numbers)
        log.append(f"F{number}")
        output.register_hook(lambda gradient: log.append(f"B{number}"))  # type: ignore[no-untyped-call]

    module.register_forward_hook(hook)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_its_actions_in_the_order_of_the_schedule(name: str) -> None:
    """The stages are two segments and the head."""
    logs: list[list[str]] = [[], [], []]
    split = cluster(
        plan_of((1, 3), 3, name),
        transformer(),
        fresh(transformer(), torch.float64).state_dict(),
        head_of=lambda part: _LoggingHead(part, logs[-1]),
    )
    for segment, log in zip(split.segments, logs, strict=False):
        log_passes(segment.parts[-1].module, log)
    split.pipeline.run(ragged(), KEY)
    assert logs == [list(map(str, actions)) for actions in build(name, 2, 3)]


class _SlowHead(_LoggingHead):
    """A head that is never ready, so callers wait for its answers."""

    def ready(self, micro_batch: int) -> bool:
        """Return False."""
        return False


def test_activations_are_sent_before_earlier_answers_arrive() -> None:
    """GPipe sends all activations before the first answer, 1F1B with two segments sends two."""
    for name, expected in {"gpipe": "F0 F1 F2 F3 F4 B0", "one_f_one_b": "F0 F1 B0 F2 B1"}.items():
        log: list[str] = []
        split = cluster(
            plan_of((1, 3), 5, name),
            transformer(),
            fresh(transformer(), torch.float64).state_dict(),
            head_of=lambda part, log=log: _SlowHead(part, log),  # type: ignore[misc]
        )
        split.pipeline.run(ragged(), KEY)
        assert log[: len(expected.split())] == expected.split()


@pytest.fixture
def scope() -> Iterator[Cancellation]:
    """A scope that can be cancelled."""
    with cancellable() as scope:
        yield scope


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cancelled_pipeline_stops_and_frees_activations_and_gradients(
    schedule: str, scope: Cancellation
) -> None:
    """No action follows the action in which the round was cancelled."""
    log: list[str] = []
    heads: list[LocalHead] = []

    def head_of(part: HeadPart) -> LocalHead:
        heads.append(_LoggingHead(part, log, scope, at=3))
        return heads[-1]

    split = cluster(
        plan_of((1, 3), NUM_SAMPLES, schedule),
        transformer(),
        fresh(transformer(), torch.float64).state_dict(),
        head_of=head_of,
    )
    lasts = [segment.parts[-1].module for segment in split.segments]
    outputs = [_LiveOutputs(module) for module in (split.model.embedding, *lasts)]
    for module in lasts:
        log_passes(module, log)
    parameters = [*split.model.embedding.parameters(), *split.model.blocks.parameters()]
    with split.pipeline as pipeline:
        for _ in range(2):
            with pytest.raises(CancelledRoundError, match="cancelled"):
                pipeline.run(ragged(), KEY)
            assert log[-3:] == ["F3"] * 3
        # There are activations to free; backwards have begun except with GPipe.
        assert all(output.alive for output in outputs)
        begun = any(parameter.grad is not None for parameter in parameters)
        assert begun == (schedule != "gpipe")
    parameters += split.model.head.parameters()
    assert [parameter.grad for parameter in parameters] == [None] * len(parameters)
    assert [output.alive for output in outputs] == [0, 0, 0]
    assert not any(map(heads[0].ready, range(NUM_SAMPLES)))


def test_a_scope_that_is_not_cancelled_does_not_change_the_loss(scope: Cancellation) -> None:
    spec, batch = transformer(), ragged()
    whole = fresh(spec, torch.float64)
    split = cluster(plan_of((2, 2), 2, "gpipe"), spec, whole.state_dict())
    with split.pipeline as pipeline:
        assert pipeline.run(batch, KEY) == pytest.approx(unsplit_loss(whole, batch), abs=1e-10)


def test_a_plan_without_some_blocks_is_refused() -> None:
    """It would silently train a smaller model."""
    plan = ClusterPlan(3, (SegmentPlan("device-0", Span(0, 1)),), 1, "gpipe")
    embedding, blocks, head = parts_of(SplitModel(transformer(), VOCABULARY), ADAMW)
    with pytest.raises(ConfigError, match=f"unit 3: .* hold 1 of {len(blocks)} blocks"):
        inline_pipeline(plan, embedding, blocks, LocalHead(head))
