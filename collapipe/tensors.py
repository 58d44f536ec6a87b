"""Tensors by name: the weights, states and gradients that are passed around."""

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass and without a copy."""
    if not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor))
    return bool(torch.isfinite(extremes).all())
