"""The head, the stage after the last segment: (micro-batch, activation) → loss, gradient."""

import threading
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from collapipe.models.dropout import DropoutKey
from collapipe.models.part import HeadPart
from collapipe.models.split import HEAD
from collapipe.tensors import Batch, Tensors

Answer = tuple[float, Tensor]


class TrainedParts(Protocol):
    """Parts of the model that train together, on this unit or elsewhere."""

    def step(self, rate: float, scale: float) -> None:
        """Take an optimiser step with the gradients times ``scale``."""

    def weights(self) -> Tensors:
        """Weights by their names in the whole model; empty for a head that the server has."""

    def optimizer_state(self) -> Tensors:
        """Optimiser state, by the same names."""

    def forget(self) -> None:
        """Drop the activations, answers and gradients of an aborted step."""


class PipelineHead(TrainedParts, Protocol):
    """The pipeline's last stage. It may compute at the same time as the segments, because
    ``submit`` does not wait."""

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        """Begin a step; ``target_tokens`` is the divisor of its losses."""

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Pass the last segment's activation to the head."""

    def ready(self, micro_batch: int) -> bool:
        """Whether ``answer`` would return at once."""

    def answer(self, micro_batch: int) -> Answer:
        """Wait for the micro-batch's loss and the gradient of its activation, and return them."""

    def on_answer(self, arrived: threading.Event) -> None:
        """Set ``arrived`` whenever an answer arrives, if the head answers asynchronously."""

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        """Send the parts' squared gradient norms to the head. Returns the head's norms."""


class LocalHead:
    """A head on the control unit."""

    def __init__(self, part: HeadPart) -> None:
        self._part = part
        self._answers: dict[int, Answer] = {}

    def begin(self, key: DropoutKey, micro_batches: Sequence[Batch], target_tokens: int) -> None:
        self._key, self._micro_batches, self._tokens = key, micro_batches, target_tokens

    def submit(self, micro_batch: int, hidden: Tensor) -> None:
        """Compute the answer immediately."""
        batch = self._micro_batches[micro_batch]
        generator = self._key.generator(HEAD, micro_batch)
        self._answers[micro_batch] = self._part.answer(
            hidden, batch.mask, batch.targets, self._tokens, generator
        )

    def ready(self, micro_batch: int) -> bool:
        return micro_batch in self._answers

    def answer(self, micro_batch: int) -> Answer:
        return self._answers.pop(micro_batch)

    def on_answer(self, arrived: threading.Event) -> None:
        """Do nothing: ``submit`` computes the answers."""

    def exchange_norms(self, squared_norms: Sequence[float]) -> list[float]:
        return [self._part.squared_norm()]

    def step(self, rate: float, scale: float) -> None:
        self._part.step(rate, scale)

    def forget(self) -> None:
        self._answers.clear()
        self._part.forget_gradients()

    def weights(self) -> Tensors:
        return self._part.weights()

    def optimizer_state(self) -> Tensors:
        return self._part.optimizer_state()
