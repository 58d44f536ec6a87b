"""A unit's update, and its norm, which clipping bounds."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collapipe.tensors import Tensors

_AT_ONCE = 2**15  # weights: what is made of so many stays in a processor's cache


def update_norm(trained: Tensors, sent: Tensors) -> float:
    """‖θₙ(t+1) − θ(t)‖₂ over the weights that a unit returned; whole numbers and truth values have
    no part in it."""
    names = (name for name, tensor in trained.items() if tensor.is_floating_point())
    return _norm(change for name in names for change in _changes(trained[name], sent[name]))


def weights_norm(weights: Tensors) -> float:
    """‖θ‖₂; whole numbers and truth values have no part in it."""
    real = (each for each in weights.values() if each.is_floating_point())
    return _norm(piece.double() for each in real for piece in _split(each))


def add_clipped_update(total: Tensors, trained: Tensors, sent: Tensors, most: float) -> float:
    """Add the change θₙ(t+1) − θ(t) to ``total``, scaled such that its norm is ``most`` at most.

    ``total`` has those weights that are real numbers, as float64, each in the order of memory.
    Weights must be finite. Returns the norm before.
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
    """In double precision: the difference of two large weights of single precision is none, and
    squares of it would overflow."""
    for after, before in zip(_split(trained), _split(sent), strict=True):
        yield after.double() - before.double()


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _AT_ONCE)
