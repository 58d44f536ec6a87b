"""One device's blocks: forward, backward, and what it keeps between the two."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.part import Part


class Segment:
    """Consecutive parts of the model that one device holds.

    With ``recompute`` it keeps of a micro-batch its inputs alone, and computes it once more, with
    the same dropout, when the gradient is there.
    """

    def __init__(self, parts: Sequence[Part], recompute: bool = False) -> None:
        self.parts, self._recompute = parts, recompute
        self._kept: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def forward(self, micro_batch: int, inputs: Tensor, key: DropoutKey, *mask: Tensor) -> Tensor:
        """Activation [b, s, d] of the last part, on this segment's device, to which inputs are
        brought; ``mask`` goes to each part that takes one."""
        device = self.parts[0].device
        inputs, mask = inputs.to(device), tuple(each.to(device) for each in mask)
        if inputs.is_floating_point():  # token ids have no gradient
            inputs = inputs.detach().requires_grad_()
        compute = partial(self._through, inputs, mask, micro_batch, key)
        hidden = compute()  # with a graph, even if it is thrown away: bits are those of a kept one
        self._kept[micro_batch] = inputs, compute if self._recompute else lambda: hidden
        return hidden.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        """Add to the parts' gradients; the gradient of the inputs, None where they are ids."""
        inputs, output = self._kept.pop(micro_batch)
        hidden = output()
        if hidden.requires_grad:  # a frozen embedding has nothing to learn
            torch.autograd.backward(hidden, gradient.to(hidden.device))
        return inputs.grad

    def forget(self) -> None:
        """Drop what a step that was given up has left behind."""
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
