"""A unit's update, and its norm, which clipping bounds."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collapipe.tensors import Tensors


def update_norm(trained: Tensors, sent: Tensors) -> float:
    """‖θₙ(t+1) − θ(t)‖₂ over the weights that a unit returned."""
    return _norm(change for _, change in _changes(trained, sent))


def clipped_update(trained: Tensors, sent: Tensors, most: float) -> Tensors:
    """The change θₙ(t+1) − θ(t) as float64, scaled such that its norm is ``most`` at most.

    Whole numbers and truth values have no part in it. Weights must be finite.
    """
    change = dict(_changes(trained, sent))
    length = norm(change)
    if length > most:
        factor = most / length
        change = {name: tensor * factor for name, tensor in change.items()}
    return change


def norm(tensors: Tensors) -> float:
    """The Euclidean norm of all tensors as one vector."""
    return _norm(tensors.values())


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = (torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors)
    return math.hypot(*map(float, norms))  # squares of single precision would overflow


def _changes(trained: Tensors, sent: Tensors) -> Iterator[tuple[str, Tensor]]:
    """In double precision, for the difference of two large weights of single precision is none;
    one after the other, for together they take twice the model's memory."""
    for name, tensor in trained.items():
        if tensor.is_floating_point():
            yield name, tensor.double() - sent[name].double()
