"""One device's blocks: forward, backward, and the tensors that are kept in between.

A shared segment computes its rows in shares, each with gradients of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part
from collapipe.row_shares import row_ends
from collapipe.tensors import aligned

Gradients = list[list[Tensor | None]]
"""Gradients of each part's trainable weights; None for a weight without one."""


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


class SharedSegment:
    """Shares of a segment in one thread, one after another, with the interface of a segment.

    ``planned`` are the rows of all shares of the segment, ``own`` are the numbers of the shares
    that are computed here, of micro-batches with the rows ``totals``; by default all shares. Each
    share draws its own dropout and accumulates its own gradients over the micro-batches, and
    ``add_up`` adds them in the shares' order. So bits depend on the plan's shares, but not on who
    computes them.
    """

    def __init__(
        self,
        planned: Sequence[int],
        parts: Sequence[Part],
        recompute: bool,
        input_gradient: bool,
        own: range | None = None,
        totals: Sequence[int] = (),
    ) -> None:
        self.parts, self._planned, self._totals = parts, planned, totals
        self._own = range(len(planned)) if own is None else own
        self._shares = {k: Segment(parts, recompute, input_gradient) for k in self._own}
        self._rows: dict[int, int] = {}  # of the micro-batches between forward and backward
        self.gradients: dict[int, Gradients] = {}  # of each share, of each part

    def forward(self, micro_batch: int, inputs: Tensor, key: DropoutKey, *mask: Tensor) -> Tensor:
        """Return the activation [b, s, d] of the own rows of the micro-batch."""
        total = self._totals[micro_batch] if self._totals else len(inputs)
        self._rows[micro_batch], outputs = total, []
        for share, first, end in self._with_rows(total):
            own = replace(key, share=share)
            masks = (each[first:end] for each in mask)
            rows = aligned(inputs[first:end])  # as they arrive on a device of their own
            outputs.append(self._shares[share].forward(micro_batch, rows, own, *masks))
        return torch.cat(outputs)

    def backward(self, micro_batch: int, gradient: Tensor | None = None) -> Tensor | None:
        """Accumulate the gradients of each share, and return that of the inputs, if computed."""
        inputs = []
        for share, first, end in self._with_rows(self._rows.pop(micro_batch)):
            rows = None if gradient is None else aligned(gradient[first:end])
            self._swap(share)
            inputs.append(self._shares[share].backward(micro_batch, rows))
            self._swap(share)
        known = [each for each in inputs if each is not None]
        return torch.cat(known) if known else None

    def add_up(self) -> None:
        """Let the parts have the sum of all shares' gradients, also of those that were computed
        elsewhere and put into ``gradients``."""
        shares = [self.gradients[share] for share in sorted(self.gradients)]
        self.gradients.clear()
        for number, part in enumerate(self.parts):  # so that one part's sums are there in addition
            own: Gradients = []
            for gradients in filter(None, shares):
                own, gradients[number] = added(own, [gradients[number]]), []
            for sums in own:
                part.swap_gradients(sums)

    def forget(self) -> None:
        """Drop the activations and gradients of an aborted step."""
        self._rows.clear()
        self.gradients.clear()
        for share in self._shares.values():
            share.forget()

    def _with_rows(self, total: int) -> list[tuple[int, int, int]]:
        """Return each own share that has rows: its number and its range among the own rows."""
        ends = (0, *row_ends(self._planned, total))
        first = ends[self._own.start]
        ranges = ((k, ends[k] - first, ends[k + 1] - first) for k in self._own)
        return [each for each in ranges if each[2] > each[1]]

    def _swap(self, share: int) -> None:
        before = self.gradients.get(share) or [[] for _ in self.parts]
        pairs = zip(self.parts, before, strict=True)
        self.gradients[share] = [part.swap_gradients(own) for part, own in pairs]


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return the sums of two shares' gradients; a share without rows has none."""
    if not (left and right):
        return left or right
    return [
        [b if a is None else a if b is None else a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(left, right, strict=True)
    ]
