"""An output layer over a vocabulary whose logits would not fit into memory.

All logits of n tokens and V classes are n · V numbers, and their gradient as many: 2.4 GB in
float32 for 2,048 tokens and 151,936 classes. Here the logits of a piece of the tokens are made at a
time and replaced by their gradient in place, as in Liger Kernel (Hsu et al. 2024). An output weight
that is kept in another dtype is widened a slice at a time. Few logits are made at once. A GPU with
more memory has larger pieces and slices, because many small operations take it longer.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collapipe.models.weights.kept import Widened

_WHOLE = 2**22  # logits that are made at once: torch needs several times their memory
_PIECE = 19 * 2**19  # logits of a piece: 40 MB in float32, 65 tokens of 151,936 classes
_GROUP = 2**20  # logits of a piece that are finished at a time
_SLICE = 2**21  # numbers of a kept weight that are widened at a time: 8 MB in float32
_GPU_BYTES = 8 * 2**30  # a GPU with n times this memory has pieces and slices n times as large
_in_one: ContextVar[bool] = ContextVar("in_one", default=False)


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Make no pieces in this context: tensors without memory are counted ten times as fast."""
    token = _in_one.set(True)
    try:
        yield
    finally:
        _in_one.reset(token)


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """Maps hidden states [n, d] to logits [n, V]."""

    weight: Tensor  # [V, d], in the dtype in which it is kept
    bias: Tensor | None  # [V]
    # what the model does to each row of the result [n, V], such as a soft cap; None: nothing
    finish: Callable[[Tensor], Tensor] | None = None

    def at_once(self, tokens: int, dtype: torch.dtype) -> bool:
        """Whether the logits of ``tokens`` tokens and a wide weight fit, and ``dtype`` is its."""
        if isinstance(self.weight, Widened) and self.weight.numel() > _SLICE:
            return False
        return tokens * len(self.weight) <= _WHOLE and self.weight.dtype == dtype

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy of ``targets`` [n] for ``hidden`` [n, d].

        If the logits are made in pieces, the gradients of a trained weight and bias are added to
        their ``grad`` in place, without calling hooks.
        """
        if self.at_once(len(hidden), hidden.dtype):
            logits = functional.linear(hidden, self.weight, self.bias)
            return functional.cross_entropy(self.finished(logits), targets, reduction="sum")
        loss: Tensor = _Loss.apply(hidden, self.weight, self.bias, targets, self)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """Return the class with the highest logit for each row of ``hidden``: int64 [n]."""
        size = self.rows(_GROUP, hidden.device)
        groups = (each for _, logits in self.pieces(hidden) for each in torch.split(logits, size))
        return torch.cat([self.finished(group).argmax(-1) for group in groups])

    def pieces(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which rows of ``hidden`` make a piece, and the layer's result for them.

        All pieces use the same memory, which the caller may overwrite: allocating it again and
        again would fragment the heap.
        """
        step = min(self.rows(_PIECE, hidden.device), len(hidden))
        memory = hidden.new_empty(step, len(self.weight))
        for start in range(0, len(hidden), step):
            rows = slice(start, start + step)
            logits = memory[: len(hidden) - start]
            for classes, weight in self.slices(hidden.dtype):
                torch.mm(hidden[rows], weight.T, out=logits[:, classes])
            yield rows, logits if self.bias is None else logits.add_(self.bias)

    def finished(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the layer's result."""
        return logits if self.finish is None else self.finish(logits)

    def finishes(self, logits: Tensor) -> bool:
        """Whether the model does anything to the result."""
        first = logits[:1]
        of_both = [each.untyped_storage()._cdata for each in (self.finished(first), first)]
        return len(set(of_both)) > 1

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield classes and their rows of the weight in ``dtype``: all at once if it is kept so."""
        weight = self.weight.kept if isinstance(self.weight, Widened) else self.weight
        if weight.dtype == dtype:
            yield slice(None), weight
            return
        most = _SLICE * _room(weight.device)
        step = len(weight) if _in_one.get() else max(1, most // weight.shape[1])
        memory = weight.new_empty(step, weight.shape[1], dtype=dtype)
        for start in range(0, len(weight), step):
            classes = slice(start, start + step)
            kept = weight[classes]
            yield classes, memory[: len(kept)].copy_(kept)

    def rows(self, logits: int, device: torch.device) -> int:
        """Return the number of tokens that have about ``logits`` logits, or more on a GPU."""
        most = logits * _room(device)
        return sys.maxsize if _in_one.get() else max(1, most // len(self.weight))


@functools.cache
def _room(device: torch.device) -> int:
    """Return how many times as large as elsewhere pieces and slices on this device are."""
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).total_memory // _GPU_BYTES)


class _Loss(torch.autograd.Function):
    """The loss of an ``OutputLayer`` in pieces.

    A frozen layer's gradient of the hidden states is computed with the loss, in one pass. A trained
    layer's gradients are computed in the backward pass, from logits that are made again, because
    the loss's own gradient is not known before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        layer: OutputLayer,
    ) -> Tensor:
        ctx.layer, ctx.trains = layer, any(ctx.needs_input_grad[1:3])
        if ctx.trains or not ctx.needs_input_grad[0]:
            ctx.save_for_backward(hidden, targets)
            return _in_pieces(layer, hidden, targets)
        gradient = torch.empty_like(hidden)
        ctx.save_for_backward(gradient)
        return _in_pieces(layer, hidden, targets, gradient, hidden.new_ones(()))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.trains:
            hidden, targets = ctx.saved_tensors
            gradient = torch.empty_like(hidden)
            _in_pieces(ctx.layer, hidden, targets, gradient, scale)
        else:
            gradient = ctx.saved_tensors[0] * scale
        return gradient, None, None, None, None


def _in_pieces(
    layer: OutputLayer,
    hidden: Tensor,
    targets: Tensor,
    gradient: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the summed loss.

    With ``gradient`` [n, d], write the loss's gradient times ``scale`` to it, and add the gradients
    of the layer's weight and bias to theirs.
    """
    losses = []
    for rows, logits in layer.pieces(hidden):
        losses.append(_replaced(layer, logits, targets[rows], scale))
        if gradient is not None:
            _propagate(layer, logits, hidden[rows], gradient[rows])
    return torch.stack(losses).sum()


def _replaced(layer: OutputLayer, logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    """Return the summed loss. With ``scale``, ``logits`` become their gradient times it."""
    if not layer.finishes(logits):
        return _cross_entropy(logits, targets, scale)
    losses, step = [], layer.rows(_GROUP, logits.device)
    for group, own in zip(torch.split(logits, step), torch.split(targets, step), strict=True):
        with torch.set_grad_enabled(scale is not None):
            leaf = group.detach().requires_grad_(scale is not None)
            finished = layer.finished(leaf)
        gradient = finished.detach().clone()
        losses.append(_cross_entropy(gradient, own, scale))
        if scale is not None:
            group.copy_(torch.autograd.grad(finished, leaf, gradient)[0])
    return torch.stack(losses).sum()


def _cross_entropy(logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    """Return the summed loss. ``logits`` are overwritten: with ``scale``, by their gradient times
    it."""
    places = targets[:, None]
    logits.sub_(logits.amax(1, keepdim=True))
    chosen = logits.gather(1, places)
    total = logits.exp_().sum(1, keepdim=True)
    if scale is not None:
        logits.mul_(scale / total).scatter_add_(1, places, -scale.expand_as(total))
    return (total.log() - chosen).sum()


def _propagate(layer: OutputLayer, of_logits: Tensor, hidden: Tensor, gradient: Tensor) -> None:
    """Write the ``gradient`` of ``hidden`` [n, d], and add the gradients of weight and bias."""
    gradient.zero_()
    for classes, weight in layer.slices(hidden.dtype):
        torch.addmm(gradient, of_logits[:, classes], weight, out=gradient)
    if layer.weight.requires_grad:
        own = _accumulated(layer.weight)
        torch.addmm(own, of_logits.T, hidden, out=own)
    if layer.bias is not None and layer.bias.requires_grad:
        _accumulated(layer.bias).add_(of_logits.sum(0))


def _accumulated(weight: Tensor) -> Tensor:
    """Return the gradient to which others are added; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
