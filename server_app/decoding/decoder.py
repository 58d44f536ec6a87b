"""Trains the head on activations: one session per unit and round."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError, WireError, way_out_of_divergence
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart, clip_scale
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.models.split import HEAD, packs
from collapipe.tensors import IGNORED, is_mask
from collapipe.wire.compression.codec import FLOAT32, decode, encode, layout
from collapipe.wire.compression.feedback import ChangeCoder

OnStep = Callable[[int, int, float, int, int], None]  # unit, step, loss, samples, input tokens


@dataclass
class _OpenStep:
    number: int
    num_micro_batches: int
    target_tokens: int
    loss: float = 0.0
    answered: int = 0
    seen_tokens: int = 0
    seen_samples: int = 0
    seen_inputs: int = 0
    began: float = field(default_factory=time.monotonic)


@dataclass
class DecoderSession:
    """One unit's head during one round.

    Frames are checked against ``settings`` and ``num_classes``, the number of target ids: a small
    frame of targets can request logits that need far more memory. The session's results are used
    only if it is ``complete`` at the round's end.
    """

    settings: Settings
    unit: int
    round: int
    num_classes: int
    part: HeadPart
    # a lock held during each step: gradients of units with a shared head must not mix
    turn: AbstractContextManager[object]
    on_step: OnStep
    activation: str = FLOAT32  # precision of the received activations
    gradient: str = FLOAT32  # precision of the gradients that are sent back
    coder: ChangeCoder | None = None  # decodes activations sent as changes; None: sent whole
    target_tokens: int = 0  # in the finished steps
    diverged: str | None = None  # which loss or norm was not finite, with round and step
    _step: _OpenStep | None = None
    _steps_done: int = 0
    _last_norm: float = 0.0
    _waits_since: float | None = None  # when a step began to wait for its turn

    def __post_init__(self) -> None:
        spec = self.settings.model
        self._steps = self.settings.federation.steps_of(self.round)
        self._rows = RowsRead.by(spec)
        self._dtype = getattr(torch, self.settings.pipeline.dtype)
        parts = layout((0, spec.dim), self._dtype, self.activation)
        self.activation_tensors = len(parts) + (self.coder is not None)  # that encode an activation

    @property
    def last_step(self) -> tuple[int, float]:
        """Number of the last finished step, −1 before the first, and the head's squared norm in
        that step. A unit resumes from these after its link has broken."""
        number = self._steps[self._steps_done - 1] if self._steps_done else -1
        return number, self._last_norm

    @property
    def complete(self) -> bool:
        """Whether all steps of the round are done; the unit infers it from the last step's
        norms."""
        return self._steps_done == len(self._steps)

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and has not ended."""
        return self._step is not None

    @property
    def step_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        step = self._step
        return time.monotonic() - step.began if step else 0.0

    @property
    def waits_s(self) -> float:
        """Seconds for which a step has waited for its turn; 0 if none waits."""
        since = self._waits_since
        return time.monotonic() - since if since else 0.0

    def begin(self, step: int, num_micro_batches: int, target_tokens: int) -> None:
        """Start a step. Raises ``WireError`` unless it is the next step of the round."""
        if self._step is not None or self.complete:
            raise WireError(f"step {step} begins, but another is under way or all are done")
        if step != self._steps[self._steps_done]:
            raise WireError(f"step {step} begins, expected {self._steps[self._steps_done]}")
        samples = self.settings.batch_size
        most = samples * self.settings.task.max_length
        if not 1 <= num_micro_batches <= samples or not 1 <= target_tokens <= most:
            raise WireError(f"{num_micro_batches} micro-batches with {target_tokens} target tokens")
        self._waits_since = time.monotonic()
        self.turn.__enter__()
        self._waits_since = None
        self._step = _OpenStep(step, num_micro_batches, target_tokens)

    def answer(
        self, micro_batch: int, sent: Sequence[Tensor], mask: Tensor, targets: Tensor
    ) -> tuple[float, tuple[Tensor, ...]]:
        """Return the loss of a micro-batch, and the gradient of the activation's rows that the head
        reads [n, d]. ``compression.encode`` has encoded the ``sent`` rows and encodes the
        gradient."""
        step = self._under_way()
        if micro_batch != step.answered or micro_batch >= step.num_micro_batches:
            raise WireError(f"micro-batch {micro_batch} came, expected {step.answered}")
        read = self._check(mask, targets)
        hidden = scattered(self._decoded(sent, read.sum(1)), read)
        key = DropoutKey(self.settings.seed, self.unit, step.number)
        loss, gradient = self.part.answer(
            hidden, mask, targets, step.target_tokens, key.generator(HEAD, micro_batch)
        )
        self._check_finite("loss", loss, step)
        step.loss += loss
        step.answered += 1
        step.seen_tokens += int((targets != IGNORED).sum())
        step.seen_samples += len(targets)
        step.seen_inputs += int(mask.bool().sum())
        try:
            generator = key.generator("gradient", micro_batch)
            return loss, encode(gradient[read], self.gradient, generator)
        except NonFiniteLossError as error:
            self.diverged = self.diverged or f"{self._where(step)}: the gradient: {error}"
            raise

    def finish_step(self, squared_norms: Sequence[float]) -> float:
        """End a step: update the head and return its squared gradient norm. If that norm is not
        finite, the head is not updated."""
        step = self._under_way()
        if step.answered != step.num_micro_batches or step.seen_tokens != step.target_tokens:
            raise WireError(
                f"step {step.number} ends after {step.answered} of {step.num_micro_batches} "
                f"micro-batches and {step.seen_tokens} of {step.target_tokens} target tokens"
            )
        if not all(norm >= 0 for norm in squared_norms) or math.isinf(sum(squared_norms)):
            raise WireError("squared norms that are negative, NaN or add up to infinity")
        own = self.part.squared_norm()
        if not self._check_finite("gradients' norm", own, step):
            return own  # the unit then ends its round; the head does not step
        optimizer, total_steps = self.settings.optimizer, self.settings.federation.total_steps
        scale = clip_scale([*squared_norms, own], optimizer.clip_norm)
        self.part.step(optimizer.rate(step.number, total_steps), scale)
        self._leave_step()
        self._steps_done += 1
        self._last_norm = own
        self.target_tokens += step.target_tokens
        self.on_step(self.unit, step.number, step.loss, step.seen_samples, step.seen_inputs)
        return own

    def abandon(self) -> None:
        """Discard the current step, if any, because its stream has ended."""
        if self._step is not None:
            self.part.forget_gradients()
            self._leave_step()

    def _decoded(self, sent: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Decode the ``sent`` rows [n, d]; ``counts`` [b] is the number of rows of each sample."""
        dim = self.settings.model.dim
        if self.coder is not None:
            return self.coder.decode(sent, counts, dim, self.activation, self._dtype)
        return decode(sent, (int(counts.sum()), dim), self.activation, self._dtype)

    def _check_finite(self, what: str, value: float, step: _OpenStep) -> bool:
        if math.isfinite(value):
            return True
        way_out = way_out_of_divergence(step.number)
        self.diverged = f"{self._where(step)}: the {what} is {value}; {way_out}"
        return False

    def _where(self, step: _OpenStep) -> str:
        return f"round {self.round}, step {step.number}"

    def _under_way(self) -> _OpenStep:
        if self._step is None:
            raise WireError("no step has begun")
        return self._step

    def _leave_step(self) -> None:
        self._step = None
        self.turn.__exit__(None, None, None)

    def _check(self, mask: Tensor, targets: Tensor) -> Tensor:
        """Check the frame, and return which rows of the activation are sent: Boolean [b, s]."""
        fits = (
            is_mask(mask)
            and (mask.dtype == torch.bool or packs(self.settings.model))
            and 1 <= mask.shape[0] <= self.settings.batch_size
            and 1 <= mask.shape[1] <= self.settings.task.max_length
            and targets.dim() == 2
            and targets.shape[0] == mask.shape[0]
            and 1 <= targets.shape[1] <= self._most_targets(mask.shape[1])
            and targets.dtype == torch.int64
        )
        if not fits:
            raise WireError(
                f"mask {mask.dtype} {list(mask.shape)} and targets {targets.dtype} "
                f"{list(targets.shape)} do not fit"
            )
        wrong = (targets != IGNORED) & ((targets < 0) | (targets >= self.num_classes))
        if bool(wrong.any()):
            raise WireError(f"target ids outside of 0 … {self.num_classes - 1}")
        return self._rows.of(mask, targets)

    def _most_targets(self, length: int) -> int:
        """Return the most targets of a sample with ``length`` tokens for this head."""
        most = {"pooled": 1, "tokens": length, "causal": length}
        return most.get(str(self.settings.model.head), self.settings.task.max_length)
