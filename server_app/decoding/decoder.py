"""Trains the head on activations: one session per unit and round."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.batch import IGNORED
from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart, clip_scale
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.models.split import HEAD
from collapipe.wire.compression import FLOAT32, decode, encode, layout
from collapipe.wire.feedback import ChangeCoder

OnStep = Callable[[int, int, float, int], None]  # unit, step, loss, samples


@dataclass
class _OpenStep:
    number: int
    num_micro_batches: int
    target_tokens: int
    loss: float = 0.0
    answered: int = 0
    seen_tokens: int = 0
    seen_samples: int = 0


@dataclass
class DecoderSession:
    """One unit's head during one round.

    Frames are checked against ``settings`` and ``num_classes``, the target ids that there are:
    logits cost far more memory than the targets that ask for them. ``activation`` and ``gradient``
    are the precisions of what comes and of what answers. ``turn`` is held from the begin to the end
    of a step: where units share a head, their gradients must not mix. Nothing here is kept unless
    the session is ``complete`` at the round's end; ``target_tokens`` counts those of the finished
    steps, and an activation comes as ``activation_tensors``, with a ``coder`` perhaps as its
    change.
    """

    settings: Settings
    unit: int
    round: int
    num_classes: int
    part: HeadPart
    turn: AbstractContextManager[object]
    on_step: OnStep
    activation: str = FLOAT32
    gradient: str = FLOAT32
    coder: ChangeCoder | None = None
    target_tokens: int = 0
    diverged: str | None = None  # the loss or norm that was seen to be not finite, and where
    _step: _OpenStep | None = None
    _steps_done: int = 0
    _last_norm: float = 0.0

    def __post_init__(self) -> None:
        spec = self.settings.model
        self._steps = self.settings.federation.steps_of(self.round)
        self._rows = RowsRead.by(spec)
        self._dtype = next(self.part.module.parameters()).dtype
        parts = layout((0, spec.dim), self._dtype, self.activation)
        self.activation_tensors = len(parts) + (self.coder is not None)

    @property
    def last_step(self) -> tuple[int, float]:
        """Number of the last step that was done, −1 before the first, and the head's own squared
        norm in it: what a unit goes on from whose link has broken."""
        number = self._steps[self._steps_done - 1] if self._steps_done else -1
        return number, self._last_norm

    @property
    def complete(self) -> bool:
        """Whether all steps of the round are done; the unit knows it by the last step's norms."""
        return self._steps_done == len(self._steps)

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    def begin(self, step: int, num_micro_batches: int, target_tokens: int) -> None:
        """Start a step. Raises ``WireError`` for another step than the plan's next."""
        if self._step is not None or self.complete:
            raise WireError(f"step {step} begins, but another is under way or all are done")
        if step != self._steps[self._steps_done]:
            raise WireError(f"step {step} begins, expected {self._steps[self._steps_done]}")
        samples = self.settings.batch_size
        most = samples * self.settings.task.max_length
        if not 1 <= num_micro_batches <= samples or not 1 <= target_tokens <= most:
            raise WireError(f"{num_micro_batches} micro-batches with {target_tokens} target tokens")
        self.turn.__enter__()
        self._step = _OpenStep(step, num_micro_batches, target_tokens)

    def answer(
        self, micro_batch: int, sent: Sequence[Tensor], mask: Tensor, targets: Tensor
    ) -> tuple[float, tuple[Tensor, ...]]:
        """Loss of a micro-batch and the gradient of those rows of its activation that the head
        reads [n, d]; these were ``sent``, and the gradient goes, as ``compression.encode`` makes
        them."""
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
        try:
            generator = key.generator("gradient", micro_batch)
            return loss, encode(gradient[read], self.gradient, generator)
        except NonFiniteLossError as error:
            self.diverged = self.diverged or f"{self._where(step)}: the gradient: {error}"
            raise

    def finish_step(self, squared_norms: Sequence[float]) -> list[float]:
        """End a step: the head's own squared norm; the head has stepped when this returns."""
        step = self._under_way()
        if step.answered != step.num_micro_batches or step.seen_tokens != step.target_tokens:
            raise WireError(
                f"step {step.number} ends after {step.answered} of {step.num_micro_batches} "
                f"micro-batches and {step.seen_tokens} of {step.target_tokens} target tokens"
            )
        if not all(norm >= 0 for norm in squared_norms) or math.isinf(sum(squared_norms)):
            raise WireError("squared norms that are negative, NaN or add up to infinity")
        own = [self.part.squared_norm()]
        if not self._check_finite("gradients' norm", own[0], step):
            return own  # the unit ends its round by it; the step is left undone
        optimizer, total_steps = self.settings.optimizer, self.settings.federation.total_steps
        scale = clip_scale([*squared_norms, *own], optimizer.clip_norm)
        self.part.step(optimizer.rate(step.number, total_steps), scale)
        self._leave_step()
        self._steps_done += 1
        self._last_norm = own[0]
        self.target_tokens += step.target_tokens
        self.on_step(self.unit, step.number, step.loss, step.seen_samples)
        return own

    def abandon(self) -> None:
        """The stream is gone: leave a step that is under way, without a trace of it."""
        if self._step is not None:
            self.part.forget_gradients()
            self._leave_step()

    def _decoded(self, sent: Sequence[Tensor], counts: Tensor) -> Tensor:
        """The rows [n, d] that came, ``counts`` [b] of each sample."""
        dim, how = self.settings.model.dim, (self.activation, self._dtype)
        if self.coder is not None:
            return self.coder.decode(sent, counts, dim, *how)
        return decode(sent, (int(counts.sum()), dim), *how)

    def _check_finite(self, what: str, value: float, step: _OpenStep) -> bool:
        if math.isfinite(value):
            return True
        self.diverged = f"{self._where(step)}: the {what} is {value}; lower optimizer.lr"
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
        """Which rows of the activation are to be sent, True in [b, s]."""
        fits = (
            mask.dim() == 2
            and mask.dtype == torch.bool
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
        """Most targets of a sample with ``length`` tokens: more would be counted, not learned."""
        most = {"pooled": 1, "tokens": length, "causal": length}
        return most.get(str(self.settings.model.head), self.settings.task.max_length)
