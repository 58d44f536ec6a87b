"""A unit's weights on their way to the server: whole, or their change in fewer bits.

What rounding takes from a change stays with the unit, which adds it to its next one: so nothing is
lost for ever, however small a round's change is (error feedback: Seide et al., 2014; Karimireddy et
al., 2019). A change travels as ``name``, with int8 its rows' scales as ``name/scale``; bfloat16
travels as the int16 of its bits, for numpy has no such type.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.compression import BFLOAT16, FLOAT32, decode, encode, layout, num_bytes
from collapipe.wire.records import check_like

_BITS = torch.int16  # what bfloat16 travels as
_SUFFIXES = ("", "/scale")


def compress_update(
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
    precision: str,
) -> tuple[Tensors, Tensors]:
    """What travels, and what it lacks: the ``residual`` of the unit's next upload.

    Parameters
    ----------
    start
        The weights as they came, a copy of them: training changes tensors in place.
    end
        What became of them. With float32 they are sent as they are.
    residual
        From the unit's last upload; empty before the first.

    Raises ``NonFiniteLossError`` that names the tensor where a change is NaN or infinite.
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


def restore(
    sent: Mapping[str, Tensor], start: Mapping[str, Tensor], precision: str, sender: str
) -> Tensors:
    """The unit's weights, from what ``compress_update`` sent and the weights it started from.

    Raises ``WireError`` that names ``sender`` and the tensor unless names, shapes and dtypes are
    those expected and all values finite.
    """
    check_like(sent, _expected(start, precision), sender)
    if precision == FLOAT32:
        return dict(sent)
    restored: Tensors = {}
    for name, value in start.items():
        try:
            came = decode(_received(name, sent, precision, value.dtype), precision, value.dtype)
        except WireError as error:
            raise WireError(f"{sender} sent {name} with {error}") from error
        restored[name] = value + came if value.is_floating_point() else came
        if not all_finite(restored[name]):
            raise WireError(f"{sender} sent {name} with values that are NaN or infinite")
    return restored


def upload_bytes(weights: Mapping[str, Tensor], precision: str) -> int:
    """Payload of what ``compress_update`` sends of ``weights``."""
    return sum(num_bytes(weight.shape, weight.dtype, precision) for weight in weights.values())


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


def _received(
    name: str, sent: Mapping[str, Tensor], precision: str, dtype: torch.dtype
) -> list[Tensor]:
    tensors = [sent[name + suffix] for suffix in _SUFFIXES if name + suffix in sent]
    if precision == BFLOAT16 and dtype.is_floating_point:
        return [tensors[0].view(torch.bfloat16)]
    return tensors
