"""A tensor in fewer bits: as it is, as bfloat16, or as int8 with a scale for each row.

A row is the last dimension: of an activation a token, of a weight matrix an output. Whole numbers
and truth values always travel as they are.

Activations are encoded once and what rounding takes from them is gone: each belongs to other
samples, so there is no next message of the same tensor that could repay it. Changes of weights can
be repaid, see ``upload``. Gradients that answer activations are exact.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import all_finite
from collapipe.wire.frames import Layout

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
_LEVELS = 127  # on each side of 0


def layout(shape: Sequence[int], dtype: torch.dtype, precision: str) -> tuple[Layout, ...]:
    """Dtypes and shapes of what ``encode`` makes; with float32 a tensor keeps its own dtype."""
    size = tuple(shape)
    if precision == FLOAT32 or not dtype.is_floating_point:
        return ((dtype, size),)
    if precision == BFLOAT16:
        return ((torch.bfloat16, size),)
    return ((torch.int8, size), (torch.float32, _scale_shape(size)))


def num_bytes(shape: Sequence[int], dtype: torch.dtype, precision: str) -> int:
    """Payload of what ``encode`` makes."""
    travelling = layout(shape, dtype, precision)
    return sum(math.prod(size) * kind.itemsize for kind, size in travelling)


def encode(tensor: Tensor, precision: str) -> tuple[Tensor, ...]:
    """The tensors that travel: the values, and with int8 the rows' scales max|x| / 127.

    Values are rounded to the nearest, halves to even. Raises ``NonFiniteLossError`` where a value
    to be rounded is NaN, infinite or too large, for no int8 could say so.
    """
    if precision == FLOAT32 or not tensor.is_floating_point():
        return (tensor,)
    values = tensor.detach()
    rounded = (values.to(torch.bfloat16),) if precision == BFLOAT16 else _quantise(values)
    if not (all_finite(values) and all_finite(rounded[-1])):
        raise NonFiniteLossError(
            f"a tensor {list(tensor.shape)} has values that are NaN, infinite or too large for "
            f"{precision}"
        )
    return rounded


def decode(tensors: Sequence[Tensor], precision: str, dtype: torch.dtype) -> Tensor:
    """What ``encode`` was given, up to rounding, as ``dtype``.

    Raises ``WireError`` where dtypes and shapes are not those of ``layout``, scales are negative,
    NaN or infinite, or values too large for ``dtype``.
    """
    came = tuple((each.dtype, tuple(each.shape)) for each in tensors)
    expected = layout(came[0][1], dtype, precision) if came else ()
    if not came or came != expected:
        raise WireError(
            f"a tensor's parts, {_named(came) or 'none'}, do not fit; "
            f"expected {_named(expected) or 'some'} for {precision}"
        )
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    values, scales = tensors
    if not (all_finite(scales) and bool((scales >= 0).all())):
        raise WireError("scales that are negative, NaN or infinite")
    wide = torch.promote_types(dtype, torch.float32)
    restored = (values.to(wide) * scales.to(wide)).to(dtype)
    if not all_finite(restored):
        raise WireError(f"values and scales whose products are too large for {dtype}")
    return restored


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    rows = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not rows.numel():  # a row without elements has no largest one
        return rows.to(torch.int8), torch.zeros(_scale_shape(rows.shape))
    scales = (rows.abs().amax(-1, keepdim=True) / _LEVELS).float()
    quanta = rows / scales.where(scales > 0, 1)  # rows of zeros stay so
    # The smallest floats have scales so coarse that a quotient may be above 127.
    return quanta.round().clamp(-_LEVELS, _LEVELS).to(torch.int8), scales


def _scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], 1) if shape else ()


def _named(layouts: Sequence[Layout]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in layouts)
