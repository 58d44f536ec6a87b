"""A segment of which several shares compute their own rows of each micro-batch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from collapipe.models.dropout import DropoutKey, Rows
from collapipe.models.part import Part
from collapipe.plan import SegmentPlan
from pipeline.segment import Segment

Gradients = list[list[Tensor | None]]
"""Gradients of each part's trainable weights; None for a weight without one."""


class SharedSegment:
    """The shares of a segment in one thread, one after another, with the interface of a segment.

    Each share accumulates its own gradients over the micro-batches, and ``add_up`` adds them in the
    shares' order. So bits depend on the plan's shares, but not on who computes them.
    """

    def __init__(
        self, plan: SegmentPlan, parts: Sequence[Part], recompute: bool, input_gradient: bool
    ) -> None:
        self.parts, self._plan = parts, plan
        self._shares = [Segment(parts, recompute, input_gradient) for _ in plan.shares]
        self._rows: dict[int, int] = {}  # of the micro-batches between forward and backward
        self._gradients: list[Gradients] = [[] for _ in plan.shares]

    def forward(self, micro_batch: int, inputs: Tensor, key: DropoutKey, *mask: Tensor) -> Tensor:
        """Return the activation [b, s, d] of all rows."""
        total = self._rows[micro_batch] = len(inputs)
        outputs = []
        for share, (first, end) in self._with_rows(total):
            own = replace(key, rows=Rows(first, total))
            masks = (each[first:end] for each in mask)
            outputs.append(self._shares[share].forward(micro_batch, inputs[first:end], own, *masks))
        return torch.cat(outputs)

    def backward(self, micro_batch: int, gradient: Tensor | None = None) -> Tensor | None:
        """Accumulate the gradients of each share, and return that of the inputs, if computed."""
        inputs = []
        for share, (first, end) in self._with_rows(self._rows.pop(micro_batch)):
            rows = None if gradient is None else gradient[first:end]
            self._swap(share)
            inputs.append(self._shares[share].backward(micro_batch, rows))
            self._swap(share)
        known = [each for each in inputs if each is not None]
        return torch.cat(known) if known else None

    def add_up(self) -> None:
        """Let the parts have the sum of all shares' gradients."""
        first, *others = self._gradients
        self._gradients = [[] for _ in self._shares]
        for gradients in others:
            first = added(first, gradients)
        for part, own in zip(self.parts, first, strict=False):
            part.swap_gradients(own)

    def forget(self) -> None:
        """Drop the activations and gradients of an aborted step."""
        self._rows.clear()
        self._gradients = [[] for _ in self._shares]
        for share in self._shares:
            share.forget()

    def _with_rows(self, total: int) -> list[tuple[int, tuple[int, int]]]:
        """Return the number and the range of rows of each share that has rows."""
        ranges = enumerate(pairwise((0, *self._plan.row_ends(total))))
        return [(share, rows) for share, rows in ranges if rows[1] > rows[0]]

    def _swap(self, share: int) -> None:
        before = self._gradients[share] or [[] for _ in self.parts]
        pairs = zip(self.parts, before, strict=True)
        self._gradients[share] = [part.swap_gradients(own) for part, own in pairs]


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return the sums of two shares' gradients; a share without rows has none."""
    if not (left and right):
        return left or right
    return [
        [b if a is None else a if b is None else a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(left, right, strict=True)
    ]
