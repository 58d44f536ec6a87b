"""One device's blocks: forward, backward, and the tensors that are kept in between."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.part import Part
from collapipe.models.weight_gradients import SplitBackward


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
    forward pass with the same dropout. With ``split`` a backward pass computes the gradient of the
    inputs, and ``weight_gradients`` computes the rest.
    """

    def __init__(self, parts: Sequence[Part], recompute: bool = False, split: bool = False) -> None:
        self.parts, self._recompute, self._split = parts, recompute, split
        self._halves: dict[int, SplitBackward] = {}
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
        """Return the gradient of the inputs, None for token ids.

        The parts' gradients accumulate now or, with ``split``, later.
        """
        inputs, output = self._kept.pop(micro_batch)
        hidden = output()
        gradient = gradient.to(hidden.device)
        if self._split:
            self._halves[micro_batch] = SplitBackward(hidden, gradient, inputs)
        elif hidden.requires_grad:  # False for a frozen embedding
            _Answered.apply(hidden, gradient).backward()  # type: ignore[no-untyped-call]
        return inputs.grad

    def weight_gradients(self, micro_batch: int) -> None:
        """Accumulate the weight gradients of a split backward pass."""
        self._halves.pop(micro_batch).accumulate()

    def forget(self) -> None:
        """Drop the activations and gradients of an aborted step."""
        self._kept.clear()
        self._halves.clear()
        for part in self.parts:
            part.forget_gradients()

    def _through(
        self, hidden: Tensor, mask: tuple[Tensor, ...], micro_batch: int, key: DropoutKey
    ) -> Tensor:
        for part in self.parts:
            with drawing_from(key.generator(part.name, micro_batch)):
                hidden = part.module(hidden, *mask)
        return hidden
