"""Small integers are packed as documented and restored, for rows of any shape."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import WireError
from collapipe.wire.compression.packing import pack, packed_length, unpack

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("bits", [4, 6])
@given(shapes, st.integers(0, 2**31))
def test_packed_numbers_are_restored(bits: int, shape: tuple[int, ...], seed: int) -> None:
    """All numbers of 4 or 6 bits are restored; each row begins at a new byte."""
    generator = torch.Generator().manual_seed(seed)
    least = -(2 ** (bits - 1))
    rows = torch.randint(least, -least, shape, generator=generator, dtype=torch.int8)
    packed = pack(rows, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape[:-1], packed_length(shape[-1], bits))
    assert torch.equal(unpack(packed, shape[-1], bits), rows)
    if rows.numel():
        each = rows.reshape(-1, shape[-1]).tolist()
        packed_each = packed.reshape(len(each), -1).tolist()
        assert [by_hand(row, bits) for row in each] == [bytes(own) for own in packed_each]


def by_hand(row: list[int], bits: int) -> bytes:
    """The bytes of a row, computed as one large integer."""
    whole = sum((number % 2**bits) << bits * place for place, number in enumerate(row))
    return whole.to_bytes(packed_length(len(row), bits), "little")


@pytest.mark.parametrize(("bits", "values", "size"), [(4, 2, 1), (6, 4, 3)])
def test_a_packed_row_has_whole_groups(bits: int, values: int, size: int) -> None:
    lengths = [packed_length(length, bits) for length in range(100)]
    assert lengths == [math.ceil(length / values) * size for length in range(100)]


@pytest.mark.parametrize(("bits", "length"), [(4, 1), (6, 1), (6, 2), (6, 3)])
def test_each_bit_of_padding_must_be_zero(bits: int, length: int) -> None:
    """A row therefore has only one valid encoding."""
    packed = pack(torch.ones(length, dtype=torch.int8), bits)
    size = 8 * len(packed)
    for bit in range(bits * length, size):
        spoilt = packed.clone()
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="padding is not zero"):
            unpack(spoilt, length, bits)
