"""A control unit's round: its batches through its trainer. Knows nothing of Flower."""

import functools
import logging
import math
from dataclasses import dataclass, replace

from client_app.cluster_state import cluster_state
from client_app.link import DecoderLink
from client_app.unsplit import UnsplitTrainer
from collapipe import cancellation
from collapipe.batch import Batch
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.errors import NonFiniteLossError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart, Part, select
from collapipe.models.split import EMBEDDING, HEAD, block_name, build_empty
from collapipe.report import ClusterReport
from collapipe.runs.rows import load_shards
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import LinkAddress, TrainReply, TrainRequest
from pipeline.engine import Pipeline
from pipeline.head import HeadStage, LocalHead

_log = logging.getLogger(__name__)


Trainer = Pipeline | UnsplitTrainer  # the cluster's pipeline, or the unit alone


@dataclass(frozen=True, slots=True)
class UnitRound:
    """A finished round: the reply, and what the unit keeps until its next one."""

    reply: TrainReply
    optimizer_state: Tensors


class ControlUnit:
    """Unit n: its shard, the embedding, and the way to its cluster.

    Raises ``DataError`` for rows that cannot be read.
    """

    def __init__(self, settings: Settings, unit: int, tokenizer: Tokenizer) -> None:
        self._settings, self._unit, self._tokenizer = settings, unit, tokenizer
        self._examples = settings.task.encode(load_shards(settings)[unit], tokenizer)
        self._lengths = self._examples.lengths
        if len(self._lengths) < settings.batch_size:
            _log.warning(
                "unit %d has %d rows, fewer than batch_size=%d: each step takes all of them",
                unit,
                len(self._lengths),
                settings.batch_size,
            )

    @functools.cached_property
    def state(self) -> ClusterState:
        return cluster_state(self._settings, self._unit, self._examples, self._tokenizer.vocabulary)

    def train(self, request: TrainRequest, weights: Tensors, optimizer_state: Tensors) -> UnitRound:
        """Run the round's local steps. Raises ``NonFiniteLossError``, ``LinkError``,
        ``CancelledRoundError``."""
        settings = self._settings
        if settings.framework.unsplit:
            trainer = UnsplitTrainer(
                settings.model,
                self._tokenizer.vocabulary,
                weights,
                settings.optimizer,
                optimizer_state,
            )
            return self._run(request, trainer)
        if request.link is None:
            return self._train_with_own_head(request, weights, optimizer_state)
        with (
            self._link(request.link, request.round) as link,
            self._pipeline(request, link, weights, optimizer_state) as pipeline,
        ):
            return self._run(request, pipeline, link)

    def _train_with_own_head(
        self, request: TrainRequest, weights: Tensors, state: Tensors
    ) -> UnitRound:
        """The head is the pipeline's last stage, here on the unit: targets do not leave it."""
        settings, vocabulary = self._settings, self._tokenizer.vocabulary
        module = build_empty(lambda: settings.model.build_head(vocabulary), select(weights, HEAD))
        head = LocalHead(HeadPart(HEAD, module, settings.optimizer, state))
        with self._pipeline(request, head, weights, state) as pipeline:
            finished = self._run(request, pipeline)
            whole = {**finished.reply.weights, **head.weights()}
            kept = {**finished.optimizer_state, **head.optimizer_state()}
            reply = replace(finished.reply, weights=whole)
            return UnitRound(reply, kept)

    def _link(self, address: LinkAddress, round_: int) -> DecoderLink:
        settings = self._settings
        precision, limit = settings.compression.activation, settings.link.max_message_bytes
        return DecoderLink(address, self._unit, round_, limit, precision)

    def _pipeline(
        self, request: TrainRequest, head: HeadStage, weights: Tensors, state: Tensors
    ) -> Pipeline:
        settings, spec = self._settings, self._settings.model
        vocabulary = self._tokenizer.vocabulary
        embedding = build_empty(
            lambda: spec.build_embedding(vocabulary), select(weights, EMBEDDING)
        )
        blocks = {
            block_name(index): build_empty(
                functools.partial(spec.build_block, index), select(weights, block_name(index))
            )
            for index in range(spec.num_blocks)
        }
        parts = [Part(name, block, settings.optimizer, state) for name, block in blocks.items()]
        first = Part(EMBEDDING, embedding, settings.optimizer, state)
        return Pipeline(request.plan, first, parts, head)

    def _run(
        self, request: TrainRequest, trainer: Trainer, link: DecoderLink | None = None
    ) -> UnitRound:
        settings = self._settings
        losses, squared_norms, samples, tokens = list[float](), list[float](), 0, 0
        for step in settings.federation.steps_of(request.round):
            cancellation.check()
            batch = self._batch(step)
            try:
                loss, squared_norm = self._step(trainer, batch, step)
            except NonFiniteLossError as error:
                raise NonFiniteLossError(
                    f"unit {self._unit}, round {request.round}, step {step}: {error}; "
                    "lower optimizer.lr or set optimizer.clip_norm"
                ) from error
            losses.append(loss)
            squared_norms.append(squared_norm)
            samples += batch.num_samples
            tokens += batch.num_targets
        if link is not None:
            link.finish()  # before its bytes are counted
        report = ClusterReport(
            self._unit,
            tuple(losses),
            samples,
            tokens,
            dict(trainer.timer.seconds),
            link.bytes_up if link else 0,
            link.bytes_down if link else 0,
            tuple(squared_norms),
        )
        reply = TrainReply(trainer.weights(), report, self.state)
        return UnitRound(reply, trainer.optimizer_state())

    def _step(self, trainer: Trainer, batch: Batch, step: int) -> tuple[float, float]:
        """Loss, and squared norm of the gradient."""
        settings = self._settings
        loss = trainer.run(batch, DropoutKey(settings.seed, self._unit, step))
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss}")
        rate = settings.optimizer.rate(step, settings.federation.total_steps)
        return loss, trainer.step(rate, settings.optimizer.clip_norm)

    def _batch(self, step: int) -> Batch:
        seed = derive(self._settings.seed, "data", self._unit)
        rows = batch_rows(self._lengths, self._settings.batch_size, step, seed)
        return self._examples.batch(rows.tolist())
