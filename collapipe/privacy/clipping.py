"""Norms of units' updates, and clipping, which bounds them."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collapipe.tensors import Tensors

_AT_ONCE = 2**15  # weights; temporary values of this size stay in a processor's cache


def update_norm(trained: Tensors, sent: Tensors) -> float:
    """Return ‖θₙ(t+1) − θ(t)‖₂ over a unit's floating-point weights."""
    names = (name for name, tensor in trained.items() if tensor.is_floating_point())
    return _norm(change for name in names for change in _changes(trained[name], sent[name]))


def weights_norm(weights: Tensors) -> float:
    """Return ‖θ‖₂ over floating-point weights."""
    real = (each for each in weights.values() if each.is_floating_point())
    return _norm(piece.double() for each in real for piece in _split(each))


def add_clipped_update(total: Tensors, trained: Tensors, sent: Tensors, most: float) -> float:
    """Add the change θₙ(t+1) − θ(t) to ``total``, scaled to a norm of at most ``most``.

    ``total`` has contiguous float64 tensors for the floating-point weights. Weights must be finite.
    Returns the norm before scaling.
    """
    length = update_norm(trained, sent)
    factor = most / length if length > most else 1.0
    for name, sums in total.items():
        pieces = zip(_split(sums), _changes(trained[name], sent[name]), strict=True)
        for piece, change in pieces:
            piece.add_(change, alpha=factor)
    return length


def _norm(parts: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in parts))


def _changes(trained: Tensor, sent: Tensor) -> Iterator[Tensor]:
    """Yield the changes in float64, because differences and squares in float32 could overflow."""
    for after, before in zip(_split(trained), _split(sent), strict=True):
        yield after.double() - before.double()


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _AT_ONCE)
