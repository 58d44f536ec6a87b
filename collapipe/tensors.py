"""Tensors by name: weights, states and gradients."""

from collections.abc import Collection

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_ALIGNMENT = 64  # bytes, as torch allocates


def chosen(tensors: Tensors, names: Collection[str]) -> Tensors:
    """Return the tensors with these names, in their original order."""
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
    """Return the tensor itself, or a copy if it is not aligned to 64 bytes as torch's own are.

    The last bits of a matrix product depend on alignment. Tensors from messages or files are often
    not aligned.
    """
    misaligned = tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT
    return tensor.clone() if misaligned else tensor
