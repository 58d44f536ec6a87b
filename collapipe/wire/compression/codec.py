"""Encode tensors in fewer bits: as bfloat16, or as int8, int6 or int4 with one scale per row.

A row is the last dimension: a token of an activation, an output of a weight matrix. Whole numbers
and truth values are always sent unchanged.

Activations and their gradients are rounded up or down at random, so that the mean is exact (QSGD:
Alistarh et al., 2017). Their rounding error is lost, because the next tensor belongs to other
samples. It is corrected an epoch later only if both ends remember every row's last activation
(``collapipe.wire.compression.feedback``).

For weights, the change since the round began is encoded. The unit keeps the rounding error and adds
it to its next change. So no change is lost, however small (error feedback: Seide et al., 2014;
Karimireddy et al., 2019).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.compression.packing import pack, packed_length, unpack
from collapipe.wire.frames import Layout

FLOAT32, BFLOAT16 = "float32", "bfloat16"
_WIDTHS = {"int8": 8, "int6": 6, "int4": 4}  # bits of a value
_SUFFIXES = ("", "/scale")  # appended to an uploaded tensor's name
_BITS = torch.int16  # an uploaded bfloat16 is sent as int16, because numpy has no bfloat16


def layout(shape: Sequence[int], dtype: torch.dtype, precision: str) -> tuple[Layout, ...]:
    """Return dtypes and shapes of the tensors that ``encode`` makes.

    With float32 a tensor keeps its dtype. Values of fewer than eight bits are packed as uint8.
    """
    size = tuple(shape)
    if precision == FLOAT32 or not dtype.is_floating_point:
        return ((dtype, size),)
    if precision == BFLOAT16:
        return ((torch.bfloat16, size),)
    values: Layout = torch.int8, size
    if (bits := _WIDTHS[precision]) < 8:
        *rows, length = size or (1,)
        values = torch.uint8, (*rows, packed_length(length, bits))
    return (values, (torch.float32, _scale_shape(size)))


def num_bytes(shape: Sequence[int], dtype: torch.dtype, precision: str) -> int:
    """Return the size in bytes of the tensors that ``encode`` makes."""
    travelling = layout(shape, dtype, precision)
    return sum(math.prod(size) * kind.itemsize for kind, size in travelling)


def sent_share(dim: int, precision: str) -> float:
    """Return the size of an encoded row of ``dim`` numbers as a fraction of its float32 size."""
    row = 1, dim
    return num_bytes(row, torch.float32, precision) / num_bytes(row, torch.float32, FLOAT32)


def encode(
    tensor: Tensor, precision: str, generator: torch.Generator | None = None
) -> tuple[Tensor, ...]:
    """Return the tensors to send: the values, and for int8, int6 and int4 the rows' scales.

    A scale is max|x| / L with L levels on each side of 0: 127, 31 or 7. Values are rounded to the
    nearest, halves to even. With a ``generator``, int8, int6 and int4 values are rounded up or down
    at random such that the mean of ``decode`` is ``tensor``.

    Raises ``NonFiniteLossError`` if a value to be rounded is NaN, infinite or too large.
    """
    if precision == FLOAT32 or not tensor.is_floating_point():
        return (tensor,)
    values = tensor.detach()
    rounded: tuple[Tensor, ...] = (values.to(torch.bfloat16),)
    if precision != BFLOAT16:
        rounded = _quantise(values, _WIDTHS[precision], generator)
    if not (all_finite(values) and all_finite(rounded[-1])):
        raise NonFiniteLossError(
            f"a tensor {list(tensor.shape)} has values that are NaN, infinite or too large for "
            f"{precision}"
        )
    return rounded


def decode(
    tensors: Sequence[Tensor], shape: Sequence[int], precision: str, dtype: torch.dtype
) -> Tensor:
    """Return the tensor that ``encode`` encoded, up to rounding, with this ``shape`` and ``dtype``.

    Raises ``WireError``, before it allocates memory, if dtypes and shapes differ from ``layout``.
    Also raises it if padding is not zero, a value is below −L, a scale is negative, NaN or
    infinite, or a result is too large for ``dtype``.
    """
    received = tuple((each.dtype, tuple(each.shape)) for each in tensors)
    expected = layout(shape, dtype, precision)
    if received != expected:
        raise WireError(
            f"a tensor's parts, {_named(received) or 'none'}, do not fit; "
            f"expected {_named(expected)} for {precision}"
        )
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    quanta, scales = _unpacked(tensors[0], shape, _WIDTHS[precision]), tensors[1]
    if not (all_finite(scales) and bool((scales >= 0).all())):
        raise WireError("scales that are negative, NaN or infinite")
    wide = torch.promote_types(dtype, torch.float32)
    restored = (quanta.to(wide) * scales.to(wide)).to(dtype)
    if not all_finite(restored):
        raise WireError(f"values and scales whose products are too large for {dtype}")
    return restored


def compress_update(
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
    precision: str,
) -> tuple[Tensors, Tensors]:
    """Return the tensors to upload and their rounding error: the next upload's ``residual``.

    ``start`` must be a copy of the received weights, because training changes tensors in place.
    ``residual`` is empty before the first upload. Entries for weights that are not sent this time
    are kept. With float32, the weights ``end`` plus their residual are sent instead of changes.

    Changes are rounded to the nearest, which is a contraction: ‖x − decode(encode(x))‖ < ‖x‖. A
    row's largest value is exact, and each other value's error is at most the value itself. So
    residuals stay bounded. Random rounding is not a contraction: with few levels, the error of a
    long row of small values exceeds the row and would grow from round to round.

    Raises ``NonFiniteLossError``, which names the tensor, if a change is NaN or infinite.
    """
    sent: Tensors = {}
    lacking = {name: value for name, value in residual.items() if name not in end}
    if precision == FLOAT32:
        return {name: _repaid(value, residual.get(name)) for name, value in end.items()}, lacking
    for name, value in end.items():
        if not value.is_floating_point():
            sent[name] = value
            continue
        change = change_of(name, start, value, residual)
        try:
            encoded = encode(change, precision)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"the change of {name}: {error}; lower optimizer.lr or set optimizer.clip_norm"
            ) from error
        sent |= _travelling(name, encoded)
        lacking[name] = change - decode(encoded, change.shape, precision, change.dtype)
    return sent, lacking


def change_of(
    name: str, start: Mapping[str, Tensor], end: Tensor, residual: Mapping[str, Tensor]
) -> Tensor:
    """Return a weight's change since ``start``, plus the residual of earlier uploads."""
    return _repaid(end - start[name], residual.get(name))


def _repaid(value: Tensor, lacking: Tensor | None) -> Tensor:
    return value if lacking is None else value + lacking


def restore(sent: Tensors, start: Tensors, precision: str, sender: str) -> Tensors:
    """Return the unit's weights, from its upload and the weights that it started from.

    Raises ``WireError``, which names ``sender`` and the tensor, if names, shapes or dtypes are not
    as expected, or if a value is not finite.
    """
    check_like(sent, expected(start, precision), sender)
    restored: Tensors = {}
    for name, value in start.items():
        try:
            named = zip(_SUFFIXES, layout(value.shape, value.dtype, precision), strict=False)
            parts = [sent[name + suffix].view(dtype) for suffix, (dtype, _) in named]
            received = decode(parts, value.shape, precision, value.dtype)
        except WireError as error:
            raise WireError(f"{sender} sent {name} with {error}") from error
        change = precision != FLOAT32 and value.is_floating_point()
        restored[name] = value + received if change else received
        if not all_finite(restored[name]):
            raise WireError(f"{sender} sent {name} with values that are NaN or infinite")
    return restored


def squared_error(tensor: Tensor, precision: str, by_chance: bool = False) -> float:
    """Return ‖x − x̂‖² of a tensor x and its decoded encoding x̂.

    With ``by_chance``, return the mean over random rounding.
    """
    if precision == FLOAT32 or not tensor.is_floating_point():
        return 0.0
    if precision == BFLOAT16:
        return float((tensor - tensor.to(torch.bfloat16)).double().square().sum())
    quotients, scales = _quotients(tensor, _WIDTHS[precision])
    if by_chance:  # a coin that is 1 with the probability of the fraction
        fraction = quotients - quotients.floor()
        squares = fraction * (1 - fraction)
    else:
        squares = (quotients - quotients.round()).square()
    return float((squares.double() * scales.double().square()).sum())


def _quantise(
    tensor: Tensor, bits: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    (quotients, scales), levels = _quotients(tensor, bits), _levels(bits)
    whole = quotients.round() if generator is None else _by_chance(quotients, generator)
    # The smallest floats have scales so coarse that a quotient may be above the levels.
    quanta = whole.clamp(-levels, levels).to(torch.int8)
    return (quanta if bits == 8 else pack(quanta.reshape(quanta.shape or (1,)), bits)), scales


def _quotients(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the rows divided by their scales, and the scales."""
    rows = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if rows.numel():
        scales = (rows.abs().amax(-1, keepdim=True) / _levels(bits)).float()
    else:  # a row without elements has no largest one
        scales = torch.zeros(_scale_shape(rows.shape))
    return rows / scales.where(scales > 0, 1), scales  # rows of zeros stay so


def _by_chance(quotients: Tensor, generator: torch.Generator) -> Tensor:
    """Round each quotient up with the probability of its fraction, so that the mean is exact."""
    down = quotients.floor()
    drawn = torch.rand(quotients.shape, generator=generator, dtype=quotients.dtype)
    return down + (drawn < quotients - down)


def _unpacked(values: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    length = shape[-1] if shape else 1
    quanta = values if bits == 8 else unpack(values, length, bits).reshape(tuple(shape))
    if bool((quanta < -_levels(bits)).any()):
        raise WireError(f"values of {bits} bits below {-_levels(bits)}")
    return quanta


def _levels(bits: int) -> int:
    """Return the number of levels on each side of 0."""
    return int(2 ** (bits - 1)) - 1


def _scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], 1) if shape else ()


def _named(layouts: Sequence[Layout]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in layouts)


def check_like(tensors: Tensors, expected: Tensors, sender: str) -> None:
    """Raise ``WireError`` if names, shapes or dtypes differ from ``expected``."""
    if tensors.keys() != expected.keys():
        differing = sorted(tensors.keys() ^ expected.keys())
        raise WireError(f"{sender} sent other weights than asked for: {', '.join(differing[:3])} …")
    for name, tensor in tensors.items():
        like = expected[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise WireError(
                f"{sender} sent {name} as {tensor.dtype} {list(tensor.shape)}, "
                f"expected {like.dtype} {list(like.shape)}"
            )


def expected(start: Mapping[str, Tensor], precision: str) -> Tensors:
    """Return meta tensors with the names, dtypes and shapes of an upload."""
    expected: Tensors = {}
    for name, value in start.items():
        layouts = layout(value.shape, value.dtype, precision)
        empty = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in layouts]
        expected |= _travelling(name, empty)
    return expected


def _travelling(name: str, tensors: Sequence[Tensor]) -> Tensors:
    bits = [each.view(_BITS) if each.dtype == torch.bfloat16 else each for each in tensors]
    return {name + suffix: tensor for suffix, tensor in zip(_SUFFIXES, bits, strict=False)}
