"""Tensors by name: the weights, states and gradients that are passed around."""

from collections.abc import Collection

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_ALIGNMENT = 64  # bytes, as torch allocates


def chosen(tensors: Tensors, names: Collection[str]) -> Tensors:
    """Those of these names, in their order."""
    return {name: tensor for name, tensor in tensors.items() if name in names}


def not_finite(tensors: Tensors) -> str | None:
    """Return the first name of a tensor with a NaN or infinite value, None if all are finite."""
    return next((name for name, tensor in tensors.items() if not all_finite(tensor)), None)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass and without a copy."""
    if not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor))
    return bool(torch.isfinite(extremes).all())


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it does not begin at a multiple of 64 bytes as those that
    torch allocates do: the last bits of a matrix product depend on it.

    What arrives, or is read from a file, often begins elsewhere.
    """
    misaligned = tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT
    return tensor.clone() if misaligned else tensor
