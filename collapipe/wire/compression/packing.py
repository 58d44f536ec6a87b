"""Pack small whole numbers into bytes: two of 4 bits in one byte, four of 6 bits in three bytes.

A row, the last dimension, begins at a new byte and is padded with zeros to whole groups. Numbers
are in two's complement. A group's first number has its lowest bits, and its bytes are in
little-endian order.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from collapipe.errors import WireError


def packed_length(length: int, bits: int) -> int:
    """Return the number of bytes of a packed row of ``length`` numbers."""
    values, size = _group(bits)
    return -(-length // values) * size


def pack(rows: Tensor, bits: int) -> Tensor:
    """Pack the lowest ``bits`` of int8 rows [..., n] into uint8 [..., packed length]."""
    values, size = _group(bits)
    groups = -(-rows.shape[-1] // values)
    padded = functional.pad(rows, (0, groups * values - rows.shape[-1]))
    word = _joined(padded.view(torch.uint8) & (2**bits - 1), values, bits)
    return _parted(word, size, 8)


def unpack(packed: Tensor, length: int, bits: int) -> Tensor:
    """Return the rows [..., length] that ``pack`` packed.

    Raises ``WireError`` if the padding is not zero.
    """
    values, size = _group(bits)
    padded = _parted(_joined(packed, size, 8), values, bits)
    if bool(padded[..., length:].any()):
        raise WireError(f"packed numbers of {bits} bits whose padding is not zero")
    sign = 2 ** (bits - 1)
    signed: Tensor = (padded[..., :length] ^ sign).view(torch.int8) - sign
    return signed


def _group(bits: int) -> tuple[int, int]:
    """Return the numbers and bytes of the smallest group that fills whole bytes."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8


def _joined(rows: Tensor, count: int, bits: int) -> Tensor:
    """Join each ``count`` neighbouring numbers of ``bits`` bits into one whole number."""
    columns = rows.reshape(*rows.shape[:-1], rows.shape[-1] // count, count).int().unbind(-1)
    words = (each << bits * place for place, each in enumerate(columns))
    return functools.reduce(torch.bitwise_or, words)


def _parted(words: Tensor, count: int, bits: int) -> Tensor:
    """Split each whole number into ``count`` neighbouring numbers of ``bits`` bits."""
    columns = [words >> bits * i & (2**bits - 1) for i in range(count)]
    return torch.stack([each.to(torch.uint8) for each in columns], -1).flatten(-2)
