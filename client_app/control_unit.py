"""A control unit's round: its batches through its trainer. Knows nothing of Flower."""

import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad_norm_

from client_app.arrival import taken_s
from client_app.cluster_state import cluster_state
from client_app.devices import DevicePipeline, Devices, RoundStart
from client_app.link import DecoderLink, LinkPrecisions
from client_app.rounding import ActivationMeter
from client_app.stem_rows import StemRows
from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.errors import NonFiniteLossError
from collapipe.inventory.cluster import DeviceCluster
from collapipe.models.activation_store import ActivationStore, activation_folder
from collapipe.models.cut import rows_behind
from collapipe.models.dropout import DropoutKey
from collapipe.models.optimizer import Optimizer
from collapipe.models.part import HeadPart, Part, select
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import (
    EMBEDDING,
    HEAD,
    ModelSpec,
    SplitModel,
    block_name,
    build_empty,
)
from collapipe.models.stem import StemSpec
from collapipe.report import START, ClusterReport
from collapipe.runs.rows import load_shard
from collapipe.sections import LoraSettings, OptimizerSettings
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.messages import TrainReply, TrainRequest
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from pipeline.timer import PhaseTimer

_log = logging.getLogger(__name__)


class UnsplitTrainer:
    """The baseline ``vanilla_fl``: the unit alone trains the whole model, in a pipeline's steps.

    Shares no code with the pipeline: one model, one optimiser, torch's own clipping. So it is also
    the oracle that the pipeline is held against.
    """

    def __init__(
        self,
        spec: ModelSpec,
        vocabulary: Vocabulary,
        weights: Tensors,
        settings: OptimizerSettings,
        state: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        model = build_empty(lambda: SplitModel(spec, vocabulary), weights)
        self._model = model.to(device).train()
        self._optimizer = Optimizer(settings, self._model)
        self._optimizer.load_state(state)
        self.timer = PhaseTimer()

    def run(self, batch: Batch, key: DropoutKey) -> float:
        """Forward and backward; the loss."""
        assert isinstance(self._model, SplitModel)
        with self.timer.phase("forward"):
            loss = self._model.loss(batch.to(self._model.device), key) / batch.num_targets
        with self.timer.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Clip by the global norm and step; the norm's square, before it was clipped."""
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


Trainer = Pipeline | UnsplitTrainer  # the cluster's pipeline, or the unit alone
Head = DecoderLink | LocalHead


class ControlUnit:
    """Unit n: its shard, the embedding, and the way to its cluster.

    Raises ``DataError`` for rows that cannot be read, and ``ConfigError`` where this machine lacks
    the ``device`` to compute on.
    """

    def __init__(self, settings: Settings, unit: int, tokenizer: Tokenizer) -> None:
        self._settings, self._unit, self._vocabulary = settings, unit, tokenizer.vocabulary
        self.device = settings.unit_device
        self._examples = settings.task.encode(load_shard(settings, unit), tokenizer)
        self._lengths = self._examples.lengths
        if len(self._lengths) < settings.batch_size:
            _log.warning(
                "unit %d has %d rows, fewer than batch_size=%d: each step takes all of them",
                *(unit, len(self._lengths), settings.batch_size),
            )
        cluster = settings.build("cluster")
        real = isinstance(cluster, DeviceCluster) and settings.framework.train
        self._devices = Devices(settings, cluster, unit) if real else None
        if settings.compression.feedback:
            tokens = RowsRead.by(settings.model).most(self._lengths)
            most = tokens * settings.model.dim * getattr(torch, settings.pipeline.dtype).itemsize
            _log.info(
                "unit %d: compression.feedback=true keeps %s bytes here, and as many on the server",
                *(unit, f"{most:,}"),
            )

    @functools.cached_property
    def _described(self) -> ClusterState:
        return cluster_state(self._settings, self._unit, self._examples, self._vocabulary)

    @property
    def state(self) -> ClusterState:
        """The cluster; of devices that are real, which of them answer now."""
        return self._state()

    @property
    def has_devices(self) -> bool:
        """Whether the unit's devices are real."""
        return self._devices is not None

    @property
    def slowness(self) -> Tensors:
        """What was measured of real devices' speeds, for the next round to go on from; set before a
        round or a question for the ``state``. Raises ``WireError`` for what cannot be measured."""
        return self._devices.slowness.pack() if self._devices else {}

    @slowness.setter
    def slowness(self, kept: Tensors) -> None:
        if self._devices is not None:
            self._devices.recall(kept)

    def _state(self, alive: Collection[str] = ()) -> ClusterState:
        """As ``state``, where devices that are ``alive`` need not be asked."""
        if self._devices is None:
            return self._described
        there = self._devices.present(self._described.devices, alive)
        return replace(self._described, devices=there, real_devices=True)

    def stem_rows(self, kept: Tensor | None) -> StemRows:
        """The account of a round, where ``kept`` are the numbers of the rows that the last round
        left, int64 [n], if any; a run that goes on may have had more rows."""
        settings, adapter, spec = self._settings, self._settings.adapter, self._settings.model
        further = rows_behind(spec.base, spec.frozen_blocks) if isinstance(spec, StemSpec) else 0
        row_bytes = spec.dim * getattr(torch, settings.pipeline.dtype).itemsize
        rows = np.zeros(len(self._lengths), np.bool_)
        if kept is not None:
            rows[kept.numpy()[kept.numpy() < len(rows)]] = True
        return StemRows(
            (np.asarray(self._lengths, np.int64) + further) * row_bytes,
            rows,
            adapter.cache_bytes if isinstance(adapter, LoraSettings) and adapter.cache else 0,
        )

    def activation_memory(self, kept: Tensors) -> ActivationMemory:
        """What was ``kept`` of activations of the rows that there are: a run that goes on may have
        had more. Raises ``WireError`` where it is not of this model."""
        dtype = getattr(torch, self._settings.pipeline.dtype)
        memory = ActivationMemory.unpack(kept, self._settings.model.dim, dtype)
        there = {row: each for row, each in memory.rows.items() if row < len(self._lengths)}
        return replace(memory, rows=there)

    def change_coder(self, request: TrainRequest, known: Tensors, later: Tensors) -> ChangeCoder:
        """The round's, where activations of earlier rounds are ``known``; ``later`` are those of
        the last one, of which the unit does not know yet whether it counts."""
        memory, last = map(self.activation_memory, (known, later))
        agreed = memory.agreed(last, request.remembered)
        return ChangeCoder(agreed, request.round, len(self._lengths))

    def train(
        self,
        request: TrainRequest,
        weights: Tensors,
        state: Tensors,
        stem: StemRows,
        frozen: Mapping[str, str],
        coder: ChangeCoder | None = None,
        meter: ActivationMeter | None = None,
    ) -> tuple[TrainReply, Tensors]:
        """Run the round's local steps; the reply, and the optimiser's ``state`` after them.

        ``stem`` counts the rows that a frozen stem computes; ``frozen`` has the digests of the
        frozen weights of each part.
        ``coder`` is that of the link, where changes of activations travel, and ``meter`` looks at
        these activations.
        Raises ``NonFiniteLossError``, ``LinkError`` or ``CancelledRoundError``.
        """
        settings, spec = self._settings, self._settings.model
        if isinstance(spec, StemSpec) and stem.limit_bytes and EMBEDDING in frozen:
            folder = activation_folder(frozen[EMBEDDING], spec.base, self.device)
            spec = replace(spec, store=ActivationStore(folder, stem.limit_bytes))
        if settings.framework.unsplit:
            how = settings.optimizer, state, self.device
            trainer = UnsplitTrainer(spec, self._vocabulary, weights, *how)
            return self._run(request, trainer, stem)
        with ExitStack() as stack:
            head = stack.enter_context(self._head(request, weights, state, coder, meter))
            given = spec, head, weights, state
            if self._devices is None:
                pipeline = stack.enter_context(self._pipeline(request, *given))
                return self._run(request, pipeline, stem, head)
            known = self._devices.slowness.known(self._described.devices)
            start = RoundStart(weights, state, frozen)
            remote = DevicePipeline(settings, self._devices, known, request, spec, start)
            stack.enter_context(remote)
            embedding = self._embedding(spec, weights, state)
            pipeline = stack.enter_context(remote.pipeline(embedding, head))
            reply, end = self._run(request, pipeline, stem, head)
            report = remote.report(reply.report)
        return replace(reply, report=report, state=self._state(remote.alive)), end

    def _head(
        self,
        request: TrainRequest,
        weights: Tensors,
        state: Tensors,
        coder: ChangeCoder | None,
        meter: ActivationMeter | None,
    ) -> AbstractContextManager[Head]:
        """The link to the server's head, or a head here on the unit: targets do not leave it."""
        settings, vocabulary = self._settings, self._vocabulary
        if request.link is not None:
            compression, rows = (
                settings.compression.of(request.plan.uplink),
                RowsRead.by(settings.model),
            )
            how = LinkPrecisions(compression.activation, compression.gradient, coder, meter)
            where = request.link, self._unit, request.round, settings.link
            return DecoderLink(*where, rows, how)
        module = build_empty(lambda: settings.model.build_head(vocabulary), select(weights, HEAD))
        part = HeadPart(HEAD, module, settings.optimizer, state, self.device)
        return nullcontext(LocalHead(part))

    def _pipeline(
        self,
        request: TrainRequest,
        spec: ModelSpec,
        head: Head,
        weights: Tensors,
        state: Tensors,
    ) -> Pipeline:
        optimizer = self._settings.optimizer

        def part(name: str, build: Callable[[], Module]) -> Part:
            module = build_empty(build, select(weights, name))
            return Part(name, module, optimizer, state, self.device)

        blocks = [
            part(block_name(index), functools.partial(spec.build_block, index))
            for index in range(spec.num_blocks)
        ]
        first = self._embedding(spec, weights, state)
        how = self._settings.pipeline.recompute, self._settings.pipeline.wire_dtype
        return inline_pipeline(request.plan, first, blocks, head, *how)

    def _embedding(self, spec: ModelSpec, weights: Tensors, state: Tensors) -> Part:
        def build() -> Module:
            return spec.build_embedding(self._vocabulary)

        module = build_empty(build, select(weights, EMBEDDING))
        return Part(EMBEDDING, module, self._settings.optimizer, state, self.device)

    def _run(
        self,
        request: TrainRequest,
        trainer: Trainer,
        stem: StemRows,
        head: Head | None = None,
    ) -> tuple[TrainReply, Tensors]:
        settings, seed = self._settings, derive(self._settings.seed, "data", self._unit)
        steps = list[tuple[float, float, int, int]]()
        for step in settings.federation.steps_of(request.round):
            cancellation.check()
            rows = batch_rows(self._lengths, settings.batch_size, step, seed)
            batch = replace(self._examples.batch(rows.tolist()), rows=torch.from_numpy(rows))
            try:
                loss, squared_norm = self._step(trainer, batch, step)
            except NonFiniteLossError as error:
                raise NonFiniteLossError(
                    f"round {request.round}, step {step}: {error}; "
                    "lower optimizer.lr or set optimizer.clip_norm"
                ) from error
            steps.append((loss, squared_norm, batch.num_samples, batch.num_targets))
            stem.take(rows)
        weights, kept = trainer.weights(), trainer.optimizer_state()
        link_bytes = 0, 0
        if isinstance(head, DecoderLink):
            link_bytes = head.bytes_up, head.bytes_down
        elif head is not None:
            weights, kept = weights | head.weights(), kept | head.optimizer_state()
        losses, squared_norms, samples, targets = zip(*steps, strict=True)
        seconds = {START: trainer.timer.began_s - taken_s(), **trainer.timer.seconds}
        report = ClusterReport(
            self._unit, losses, sum(samples), sum(targets), seconds, *link_bytes, squared_norms
        )
        if isinstance(settings.model, StemSpec):
            report = replace(report, stem_rows=stem.computed)
        return TrainReply(weights, report, self._described), kept

    def _step(self, trainer: Trainer, batch: Batch, step: int) -> tuple[float, float]:
        """Loss, and squared norm of the gradient."""
        settings = self._settings
        loss = trainer.run(batch, DropoutKey(settings.seed, self._unit, step))
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss}")
        rate = settings.optimizer.rate(step, settings.federation.total_steps)
        return loss, trainer.step(rate, settings.optimizer.clip_norm)
