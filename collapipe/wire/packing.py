"""Small whole numbers side by side in bytes: two of 4 bits in a byte, four of 6 bits in three.

A row, the last dimension, begins at a byte of its own and is padded with zeros to whole groups.
Numbers are in two's complement, the first of a group in its lowest bits, and the group's bytes in
little-endian order.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from collapipe.errors import WireError


def packed_length(length: int, bits: int) -> int:
    """Bytes of a row of ``length`` numbers."""
    values, size = _group(bits)
    return -(-length // values) * size


def pack(rows: Tensor, bits: int) -> Tensor:
    """Rows [..., n] of int8, of which the lowest ``bits`` count, as uint8 [..., packed length]."""
    values, size = _group(bits)
    groups = -(-rows.shape[-1] // values)
    padded = functional.pad(rows, (0, groups * values - rows.shape[-1]))
    word = _joined(padded.view(torch.uint8) & (2**bits - 1), values, bits)
    return _parted(word, size, 8)


def unpack(packed: Tensor, length: int, bits: int) -> Tensor:
    """What ``pack`` was given, [..., length]. Raises ``WireError`` for padding that is not zero."""
    values, size = _group(bits)
    padded = _parted(_joined(packed, size, 8), values, bits)
    if bool(padded[..., length:].any()):
        raise WireError(f"packed numbers of {bits} bits whose padding is not zero")
    sign = 2 ** (bits - 1)
    signed: Tensor = (padded[..., :length] ^ sign).view(torch.int8) - sign
    return signed


def _group(bits: int) -> tuple[int, int]:
    """Numbers and bytes of a group, the fewest that end together."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8


def _joined(rows: Tensor, count: int, bits: int) -> Tensor:
    """Each ``count`` neighbours of ``bits`` bits as one whole number."""
    columns = rows.reshape(*rows.shape[:-1], rows.shape[-1] // count, count).int().unbind(-1)
    words = (each << bits * place for place, each in enumerate(columns))
    return functools.reduce(torch.bitwise_or, words)


def _parted(words: Tensor, count: int, bits: int) -> Tensor:
    """Each whole number as ``count`` neighbours of ``bits`` bits."""
    columns = [words >> bits * i & (2**bits - 1) for i in range(count)]
    return torch.stack([each.to(torch.uint8) for each in columns], -1).flatten(-2)
