"""The trainers of a unit's model in a round: the cluster's pipeline, or the unit alone."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch.nn.utils import clip_grad_norm_

from client_app.control_unit import ControlUnit
from client_app.devices.round_pipeline import DevicePipeline, RoundStart
from client_app.link import DecoderLink, LinkPrecisions
from client_app.payloads import ActivationMeter
from collapipe.errors import NonFiniteLossError
from collapipe.models.dropout import DropoutKey
from collapipe.models.frozen import whole
from collapipe.models.part import HeadPart, Optimizer, Part, select
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import (
    EMBEDDING,
    HEAD,
    ModelSpec,
    SplitModel,
    block_name,
    build_empty,
    builders,
)
from collapipe.models.stem import ActivationStore, StemSpec, activation_folder
from collapipe.process.torch_device import moved
from collapipe.tensors import Batch, Tensors
from collapipe.wire.compression.feedback import ChangeCoder
from collapipe.wire.messages import TrainRequest
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from pipeline.phase_timer import PhaseTimer

P = TypeVar("P", bound=Part)


class UnsplitTrainer:
    """The baseline ``vanilla_fl``: the unit alone trains the whole model, in the pipeline's steps.

    It shares no code with the pipeline: it has one model, one optimiser and torch's clipping. Tests
    compare the pipeline with it.
    """

    def __init__(self, unit: ControlUnit, spec: ModelSpec, start: "Start") -> None:
        weights = whole(start.fixed) | start.weights
        model = build_empty(lambda: SplitModel(spec, unit.vocabulary), weights)
        self._model = moved(model, unit.device).train()
        self._optimizer = Optimizer(unit.settings.optimizer, self._model)
        self._optimizer.load_state(start.state)
        self.timer = PhaseTimer()

    def run(self, batch: Batch, key: DropoutKey) -> float:
        """Run forward and backward. Returns the mean loss per target token."""
        assert isinstance(self._model, SplitModel)
        with self.timer.phase("forward"):
            loss = self._model.loss(batch.to(self._model.device), key) / batch.num_targets
        with self.timer.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Clip by the global norm and step. Returns the squared norm before clipping."""
        with self.timer.phase("norms"):
            limit = math.inf if clip_norm is None else clip_norm
            norm = float(clip_grad_norm_(self._model.parameters(), limit))
        if not math.isfinite(norm):
            raise NonFiniteLossError(f"the gradients' norm is {norm}")
        with self.timer.phase("step"):
            self._optimizer.step(rate)
        return norm**2

    def weights(self) -> Tensors:
        """All weights by name, on the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}

    def optimizer_state(self) -> Tensors:
        """The optimiser's state by the weights' names."""
        return self._optimizer.state()


@dataclass(frozen=True, slots=True)
class Start(RoundStart):
    """The inputs of a round's trainer.

    Trainable weights and the optimiser's state have the weights' names in the model. Activations of
    a frozen stem are stored up to ``stem_limit_bytes``. ``coder`` sends activations as changes, and
    ``meter`` measures their rounding errors; each is None if the run does not use it.
    """

    stem_limit_bytes: int
    coder: ChangeCoder | None
    meter: ActivationMeter | None

    def part(self, name: str) -> Tensors:
        """Return all weights of a part by their names in it."""
        return {**self.fixed.get(name, {}), **select(self.weights, name)}


@dataclass(frozen=True, slots=True)
class RoundTrainer:
    """A round's trainer, with the ``link`` to a head on the server and the real ``devices``."""

    trainer: Pipeline | UnsplitTrainer
    link: DecoderLink | None = None
    devices: DevicePipeline | None = None


@contextmanager
def open_trainer(unit: ControlUnit, request: TrainRequest, start: Start) -> Iterator[RoundTrainer]:
    """Open the trainer of a round. Raises ``LinkError`` if the server's head cannot be
    reached, and ``RoundFailedError`` if the remaining devices cannot hold the model."""
    settings, spec = unit.settings, _with_store(unit, start)
    if settings.framework.unsplit and unit.devices is None:
        yield RoundTrainer(UnsplitTrainer(unit, spec, start))
        return
    link = _link(unit, request, start)
    with ExitStack() as stack:
        part = partial(_part, unit, spec, start)
        head = stack.enter_context(link) if link else LocalHead(part(HEAD, HeadPart))
        if unit.devices is None:
            pipeline = inline_pipeline(
                plan=request.plan,
                embedding=part(EMBEDDING, Part),
                blocks=[part(block_name(n), Part) for n in range(spec.num_blocks)],
                head=head,
                recompute=settings.pipeline.recompute is True,
                wire_dtype=settings.pipeline.wire_dtype,
            )
            yield RoundTrainer(stack.enter_context(pipeline), link)
            return
        devices = DevicePipeline(
            settings=settings,
            devices=unit.devices,
            described=unit.described.devices,
            request=request,
            spec=spec,
            start=start,
            embedding=part(EMBEDDING, Part),
        )
        stack.callback(devices.keep_relay)  # also if the round fails
        stack.enter_context(devices.segments)
        pipeline = devices.pipeline(head)
        yield RoundTrainer(stack.enter_context(pipeline), link, devices)


def _with_store(unit: ControlUnit, start: Start) -> ModelSpec:
    """Return the model's specification; if it has a frozen stem, the stem stores activations of
    rows on disk."""
    spec = unit.settings.model
    digest = start.fixed.digests.get(EMBEDDING)
    if not (isinstance(spec, StemSpec) and start.stem_limit_bytes and digest):
        return spec
    folder = activation_folder(digest, spec.base, unit.device)
    return replace(spec, store=ActivationStore(folder, start.stem_limit_bytes))


def _link(unit: ControlUnit, request: TrainRequest, start: Start) -> DecoderLink | None:
    """Return the link to the server's head, or None if the head is on the unit; then the targets
    stay there, too."""
    if request.link is None:
        return None
    compression = unit.settings.compression.of(request.plan.uplink)
    return DecoderLink(
        link=request.link,
        unit=unit.number,
        round_=request.round,
        settings=unit.settings.link,
        rows=RowsRead.by(unit.settings.model),
        precisions=LinkPrecisions(
            compression.activation, compression.gradient, start.coder, start.meter
        ),
    )


def _part(unit: ControlUnit, spec: ModelSpec, start: Start, name: str, kind: type[P]) -> P:
    """Build a part of the model, with the weights and the state from which the round starts."""
    module = build_empty(builders(spec, unit.vocabulary)[name], start.part(name))
    return kind(name, module, unit.settings.optimizer, start.state, unit.device)
