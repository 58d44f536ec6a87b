"""What arrives is what was sent, up to half a quantum; how many bytes it takes is known before."""

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import all_finite
from collapipe.wire.compression import decode, encode, layout, num_bytes

PRECISIONS = ["float32", "bfloat16", "int8"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-20, 20, (*shape[:-1], 1) if shape else (), generator=generator)
    return (torch.randn(tuple(shape), generator=generator) * 2.0**rows).to(dtype)


def refused(tensors: Sequence[Tensor], precision: str, dtype: torch.dtype = torch.float32) -> str:
    """The one line that is said of them."""
    with pytest.raises(WireError) as caught:
        decode(tensors, precision, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("precision", "dtype"), [*product(PRECISIONS, [*DTYPES, torch.int64])])
@given(shapes, st.integers(0, 2**31))
def test_the_layout_and_the_bytes_are_those_of_what_travels(
    precision: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    """For every shape, empty ones and scalars among them, and it comes back in it."""
    tensor = normal(shape, seed, dtype)
    sent = encode(tensor, precision)
    assert layout(shape, dtype, precision) == tuple((s.dtype, tuple(s.shape)) for s in sent)
    assert num_bytes(shape, dtype, precision) == sum(s.numel() * s.element_size() for s in sent)
    back = decode(sent, precision, dtype)
    assert (back.shape, back.dtype) == (tensor.shape, dtype)


def test_the_bytes_of_an_activation() -> None:
    """Four, two, and one with four for each token."""
    assert [num_bytes((2, 3, 64), torch.float32, each) for each in PRECISIONS] == [
        2 * 3 * 64 * 4,
        2 * 3 * 64 * 2,
        2 * 3 * (64 + 4),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_sends_the_tensor_itself(dtype: torch.dtype) -> None:
    """In its own dtype, bit for bit."""
    tensor = normal((3, 4), 1, dtype)
    (sent,) = encode(tensor, "float32")
    assert sent is tensor
    assert decode((sent,), "float32", dtype) is tensor


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tensor", [torch.tensor([2**40, -1]), torch.tensor([True, False])])
def test_whole_numbers_and_truth_values_are_exact(precision: str, tensor: Tensor) -> None:
    assert torch.equal(decode(encode(tensor, precision), precision, tensor.dtype), tensor)


@given(shapes, st.integers(0, 2**31), st.sampled_from(DTYPES))
def test_bfloat16_keeps_eight_bits(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    tensor = normal(shape, seed, dtype)
    back = decode(encode(tensor, "bfloat16"), "bfloat16", dtype)
    assert bool(((back - tensor).abs() <= tensor.abs() * 2**-8).all())


@given(shapes, st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_int8_is_right_within_half_a_quantum_of_its_row(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    """Small rows suffer nothing from large ones, and the largest value of each stays."""
    tensor = normal(shape, seed, dtype)
    quanta, scales = encode(tensor, "int8")
    back = decode((quanta, scales), "int8", dtype)
    if not tensor.numel():
        return
    largest = tensor.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales.to(dtype), largest / 127)
    assert bool(((back - tensor).abs() <= largest / 254 * (1 + 1e-5)).all())
    assert bool((quanta.abs().amax(-1) == 127).all())


def test_halves_go_to_the_even_neighbour() -> None:
    """So that rounding has no drift."""
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert encode(row, "int8")[0].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("value", [0.0, 2.0**-149])
def test_a_row_of_zeros_stays_one(value: float) -> None:
    """Beside rows that are not; so does one too small to have a scale."""
    rows = torch.tensor([[0.0, value], [1.0, -2.0]])
    quanta, scales = encode(rows, "int8")
    assert scales[0] == 0
    assert quanta[0].tolist() == [0, 0]
    assert torch.equal(decode((quanta, scales), "int8", rows.dtype)[0], torch.zeros(2))


def test_the_smallest_floats_do_not_wrap_around() -> None:
    """Their scale is one or two of the smallest steps there are."""
    rows = torch.arange(1, 600.0).unsqueeze(1) * 2.0**-149
    back = decode(encode(rows, "int8"), "int8", rows.dtype)
    assert bool((back >= 0).all())
    assert bool((back <= 2 * rows).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_what_no_such_number_can_say_is_not_sent(bad: float, precision: str) -> None:
    """NaN would become a number, and a large number infinite."""
    tensor = torch.zeros(2, 3, dtype=torch.float64)
    tensor[1, 1] = bad
    with pytest.raises(NonFiniteLossError, match=rf"\[2, 3\].*too large for {precision}"):
        encode(tensor, precision)


QUANTA, SCALES = torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("tensors", "precision", "words"),
    [
        ((), "float32", "none, do not fit"),
        (
            (torch.ones(2), torch.ones(2)),
            "float32",
            "torch.float32 [2] and torch.float32 [2], do not fit",
        ),
        ((torch.ones(2).double(),), "float32", "torch.float64 [2]"),
        ((torch.ones(2),), "bfloat16", "torch.bfloat16 [2]"),
        ((QUANTA,), "int8", "torch.float32 [2, 1]"),
        ((SCALES, QUANTA), "int8", "torch.int8 [2, 1]"),
        ((QUANTA, SCALES, SCALES), "int8", "torch.float32 [2, 1] and torch.float32 [2, 1]"),
        ((QUANTA, torch.ones(2)), "int8", "torch.float32 [2],"),
        ((QUANTA, torch.ones(1, 1)), "int8", "torch.float32 [1, 1],"),
        ((QUANTA, SCALES.double()), "int8", "torch.float64 [2, 1]"),
        ((QUANTA.long(), SCALES), "int8", "torch.int64 [2, 3]"),
    ],
)
def test_what_does_not_fit_is_refused(
    tensors: tuple[Tensor, ...], precision: str, words: str
) -> None:
    """It says what came and what should have."""
    assert words in refused(tensors, precision)


@pytest.mark.parametrize("bad", [-1e-30, math.nan, math.inf, -math.inf])
def test_a_bad_scale_is_refused(bad: float) -> None:
    """Wherever it stands."""
    scales = torch.tensor([[1.0], [bad]])
    assert "scales that are negative, NaN or infinite" in refused((QUANTA, scales), "int8")


@given(st.integers(0, 2**31))
def test_rounding_twice_changes_nothing(seed: int) -> None:
    """What was decoded is made of quanta already."""
    tensor = normal((3, 5), seed)
    once = decode(encode(tensor, "int8"), "int8", tensor.dtype)
    twice = decode(encode(once, "int8"), "int8", tensor.dtype)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)
    assert all_finite(twice)


def test_numbers_that_become_infinite_are_refused() -> None:
    """Though every scale is finite."""
    assert "too large for torch.float32" in refused((QUANTA * 127, SCALES * 3e38), "int8")
