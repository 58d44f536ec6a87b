"""A tensor in fewer bits: as it is, as bfloat16, or as int8 with a scale for each row.

A row is the last dimension: of an activation a token, of a weight matrix an output. Whole numbers
and truth values always travel as they are.

Activations are encoded once and what rounding takes from them is gone: each belongs to other
samples, so there is no next message of the same tensor that could repay it. Gradients that answer
activations are exact. Of weights their change since the round began is encoded, and what rounding
takes from it stays with the unit, which adds it to its next one: so nothing is lost for ever,
however small a round's change is (error feedback: Seide et al., 2014; Karimireddy et al., 2019).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.frames import Layout

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
_LEVELS = 127  # on each side of 0
_SUFFIXES = ("", "/scale")  # of an uploaded tensor's name
_BITS = torch.int16  # what an uploaded bfloat16 travels as, for numpy has no such type


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


def compress_update(
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
    precision: str,
) -> tuple[Tensors, Tensors]:
    """What travels, and what it lacks: the ``residual`` of the unit's next upload.

    ``start`` are the weights as they came, a copy: training changes tensors in place. ``residual``
    is empty before the first upload. With float32 the weights ``end`` are sent as they are. Raises
    ``NonFiniteLossError`` that names the tensor where a change is NaN or infinite.
    """
    if precision == FLOAT32:
        return dict(end), {}
    sent: Tensors = {}
    lacking: Tensors = {}
    for name, value in end.items():
        if not value.is_floating_point():
            sent[name] = value
            continue
        change = value - start[name]
        if residual:
            change += residual[name]
        try:
            encoded = encode(change, precision)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"the change of {name}: {error}; lower optimizer.lr or set optimizer.clip_norm"
            ) from error
        sent |= _travelling(name, encoded)
        lacking[name] = change - decode(encoded, precision, change.dtype)
    return sent, lacking


def restore(sent: Tensors, start: Tensors, precision: str, sender: str) -> Tensors:
    """The unit's weights, from what ``compress_update`` sent and the weights it started from.

    Raises ``WireError`` that names ``sender`` and the tensor unless names, shapes and dtypes are
    those expected and all values finite.
    """
    _check_like(sent, _expected(start, precision), sender)
    restored: Tensors = {}
    for name, value in start.items():
        try:
            came = decode(_received(name, sent, value, precision), precision, value.dtype)
        except WireError as error:
            raise WireError(f"{sender} sent {name} with {error}") from error
        change = precision != FLOAT32 and value.is_floating_point()
        restored[name] = value + came if change else came
        if not all_finite(restored[name]):
            raise WireError(f"{sender} sent {name} with values that are NaN or infinite")
    return restored


def upload_bytes(weights: Mapping[str, Tensor], precision: str) -> int:
    """Payload of what ``compress_update`` sends of ``weights``."""
    return sum(num_bytes(weight.shape, weight.dtype, precision) for weight in weights.values())


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


def _check_like(tensors: Tensors, expected: Tensors, sender: str) -> None:
    """Raise ``WireError`` unless names, shapes and dtypes are those expected."""
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())
        raise WireError(f"{sender} sent other weights than asked for: {', '.join(odd[:3])} …")
    for name, tensor in tensors.items():
        like = expected[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise WireError(
                f"{sender} sent {name} as {tensor.dtype} {list(tensor.shape)}, "
                f"expected {like.dtype} {list(like.shape)}"
            )


def _expected(start: Mapping[str, Tensor], precision: str) -> Tensors:
    """Tensors without values, of the names, dtypes and shapes that travel."""
    expected: Tensors = {}
    for name, value in start.items():
        layouts = layout(value.shape, value.dtype, precision)
        empty = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in layouts]
        expected |= _travelling(name, empty)
    return expected


def _travelling(name: str, tensors: Sequence[Tensor]) -> Tensors:
    bits = [each.view(_BITS) if each.dtype == torch.bfloat16 else each for each in tensors]
    return {name + suffix: tensor for suffix, tensor in zip(_SUFFIXES, bits, strict=False)}


def _received(name: str, sent: Mapping[str, Tensor], like: Tensor, precision: str) -> list[Tensor]:
    named = zip(_SUFFIXES, layout(like.shape, like.dtype, precision), strict=False)
    return [sent[name + suffix].view(dtype) for suffix, (dtype, _) in named]
