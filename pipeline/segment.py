"""One device's blocks: forward, backward, and the tensors that are kept in between."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey, drawing_from
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


class Segment:
    """Consecutive parts of the model that one device holds.

    With ``recompute`` only the inputs of a micro-batch are kept; the backward pass repeats the
    forward pass with the same dropout.
    """

    def __init__(self, parts: Sequence[Part], recompute: bool = False) -> None:
        self.parts, self._recompute = parts, recompute
        self._kept: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def forward(self, micro_batch: int, inputs: Tensor, key: DropoutKey, *mask: Tensor) -> Tensor:
        """Return the activation [b, s, d] of the last part, on this segment's device. Inputs are
        moved to that device; each part receives ``mask``."""
        device = self.parts[0].device
        inputs, mask = inputs.to(device), tuple(each.to(device) for each in mask)
        if inputs.is_floating_point():  # token ids have no gradient
            inputs = inputs.detach().requires_grad_()
        compute = partial(self._through, inputs, mask, micro_batch, key)
        hidden = compute()  # always with a graph, so that recomputation gives the same bits
        self._kept[micro_batch] = inputs, compute if self._recompute else lambda: hidden
        return hidden.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Accumulate the parts' gradients, and return the inputs' gradient; None for token ids."""
        inputs, output = self._kept.pop(micro_batch)
        hidden = output()
        gradient = gradient.to(hidden.device)
        if hidden.requires_grad:  # False for a frozen embedding
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
            with drawing_from(key.generator(part.name, micro_batch)):
                hidden = part.module(hidden, *mask)
        return hidden
