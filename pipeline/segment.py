"""One device's blocks: forward, backward, and the tensors that are kept in between."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part


class _Answered(torch.autograd.Function):
    """A scalar whose gradient with respect to ``hidden`` is ``gradient``.

    It avoids ``hidden.backward(gradient)``, for which torch imports sympy to compare shapes: 36 MB
    and 0.25 s on a fast core.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def first_trained(embedding: bool, blocks: Iterable[bool]) -> int:
    """Return the index of the first block that trains, −1 if the ``embedding`` trains.

    The arguments say which of these parts train. A segment computes the gradient of its input only
    if its first block has a higher index: then a part before it trains. The last block counts as
    trained, because the head always answers.
    """
    *before, _ = embedding, *blocks
    return (*before, True).index(True) - 1


class Segment:
    """Consecutive parts of the model that one device holds.

    With ``recompute`` only the inputs of a micro-batch are kept; the backward pass repeats the
    forward pass with the same dropout. The gradient of the inputs is computed if
    ``input_gradient``.
    """

    def __init__(
        self, parts: Sequence[Part], recompute: bool = False, input_gradient: bool = True
    ) -> None:
        self.parts, self._recompute, self._input_gradient = parts, recompute, input_gradient
        self._kept: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def forward(self, micro_batch: int, inputs: Tensor, key: DropoutKey, *mask: Tensor) -> Tensor:
        """Return the activation [b, s, d] of the last part, on this segment's device. Inputs are
        moved to that device; each part receives ``mask``."""
        device = self.parts[0].device
        inputs, mask = inputs.to(device), tuple(each.to(device) for each in mask)
        if inputs.is_floating_point():  # token ids have no gradient
            inputs = inputs.detach().requires_grad_(self._input_gradient)
        compute = partial(self._through, inputs, mask, micro_batch, key)
        hidden = compute()  # always with a graph, so that recomputation gives the same bits
        self._kept[micro_batch] = inputs, compute if self._recompute else lambda: hidden
        return hidden.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None = None) -> Tensor | None:
        """Accumulate the parts' gradients, and return the inputs' gradient; None for token ids, or
        if it is not computed. Without ``gradient`` nothing up to here trains."""
        inputs, output = self._kept.pop(micro_batch)
        if gradient is not None and (hidden := output()).requires_grad:
            gradient = gradient.to(hidden.device)
            _Answered.apply(hidden, gradient).backward()  # type: ignore[no-untyped-call]
        return inputs.grad

    def forget(self) -> None:
        """Drop the activations and gradients of an aborted step."""
        self._kept.clear()
        for part in self.parts:
            part.forget_gradients()

    def _through(
        self, hidden: Tensor, mask: tuple[Tensor, ...], micro_batch: int, key: DropoutKey
    ) -> Tensor:
        for part in self.parts:
            with key.drawing(part.name, micro_batch):
                hidden = part.module(hidden, *mask)
        return hidden
