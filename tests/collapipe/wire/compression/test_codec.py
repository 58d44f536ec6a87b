"""Values arrive with an error of at most half a quantum; their size is known in advance."""

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
from collapipe.wire.compression.codec import decode, encode, layout, num_bytes, squared_error

LEVELS = {"int8": 127, "int6": 31, "int4": 7}  # on each side of 0
PRECISIONS = ["float32", "bfloat16", *LEVELS]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FLOATS = DTYPES[:2]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers in rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-20, 20, (*shape[:-1], 1) if shape else (), generator=generator)
    return (torch.randn(tuple(shape), generator=generator) * 2.0**rows).to(dtype)


def refused(tensors: Sequence[Tensor], precision: str, shape: Sequence[int] = (2, 3)) -> str:
    """The error of decoding these tensors, which has one line."""
    with pytest.raises(WireError) as caught:
        decode(tensors, shape, precision, torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("precision", "dtype"), [*product(PRECISIONS, [*DTYPES, torch.int64])])
@given(shapes, st.integers(0, 2**31))
def test_the_predicted_layout_and_bytes_equal_those_of_the_encoded_tensors(
    precision: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    """Every shape is tested, also empty ones and scalars; decoding restores the shape."""
    tensor = normal(shape, seed, dtype)
    sent = encode(tensor, precision)
    assert layout(shape, dtype, precision) == tuple((s.dtype, tuple(s.shape)) for s in sent)
    assert num_bytes(shape, dtype, precision) == sum(s.numel() * s.element_size() for s in sent)
    back = decode(sent, shape, precision, dtype)
    assert (back.shape, back.dtype) == (tensor.shape, dtype)


def test_the_bytes_of_an_activation() -> None:
    """Rows are padded to whole groups of values; each row has a scale of four bytes."""
    assert [num_bytes((2, 3, 65), torch.float32, each) for each in PRECISIONS] == [
        2 * 3 * 65 * 4,
        2 * 3 * 65 * 2,
        2 * 3 * (65 + 4),
        2 * 3 * (17 * 3 + 4),
        2 * 3 * (33 + 4),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_sends_the_tensor_itself(dtype: torch.dtype) -> None:
    """The tensor keeps its dtype and its bits."""
    tensor = normal((3, 4), 1, dtype)
    (sent,) = encode(tensor, "float32")
    assert sent is tensor
    assert decode((sent,), (3, 4), "float32", dtype) is tensor


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tensor", [torch.tensor([2**40, -1]), torch.tensor([True, False])])
def test_integers_and_booleans_are_exact(precision: str, tensor: Tensor) -> None:
    assert torch.equal(decode(encode(tensor, precision), (2,), precision, tensor.dtype), tensor)


@given(shapes, st.integers(0, 2**31), st.sampled_from(DTYPES))
def test_bfloat16_keeps_eight_bits(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    tensor = normal(shape, seed, dtype)
    back = decode(encode(tensor, "bfloat16"), shape, "bfloat16", dtype)
    assert bool(((back - tensor).abs() <= tensor.abs() * 2**-8).all())


@pytest.mark.parametrize("precision", LEVELS)
@given(shapes, st.integers(0, 2**31), st.sampled_from(FLOATS))
def test_quantised_values_are_within_half_a_quantum_of_their_row(
    precision: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    """Large rows do not affect small ones, and each row's largest value is kept."""
    tensor, levels = normal(shape, seed, dtype), LEVELS[precision]
    sent = encode(tensor, precision)
    back = decode(sent, shape, precision, dtype)
    if not tensor.numel():
        return
    largest = tensor.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(sent[1].to(dtype), largest / levels)
    assert bool(((back - tensor).abs() <= largest / (2 * levels) * (1 + 1e-5)).all())
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), largest)


@pytest.mark.parametrize("precision", LEVELS)
@given(shapes, st.integers(0, 2**31), st.sampled_from(FLOATS))
def test_stochastic_rounding_gives_a_neighbouring_level(
    precision: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    """Generators with equal seeds give equal bits."""
    tensor = normal(shape, seed, dtype)
    sent = encode(tensor, precision, torch.Generator().manual_seed(seed))
    again = encode(tensor, precision, torch.Generator().manual_seed(seed))
    assert all(map(torch.equal, sent, again))
    back = decode(sent, shape, precision, dtype)
    assert bool(((back - tensor).abs() <= sent[1].to(dtype) * (1 + 1e-5)).all())


@pytest.mark.parametrize("precision", LEVELS)
def test_stochastic_rounding_keeps_a_value_on_a_level(precision: str) -> None:
    levels = LEVELS[precision]
    row = torch.arange(-levels, levels + 1.0)
    for seed in range(20):
        sent = encode(row, precision, torch.Generator().manual_seed(seed))
        assert torch.equal(decode(sent, row.shape, precision, row.dtype), row)


@pytest.mark.parametrize("precision", LEVELS)
def test_stochastic_rounding_is_unbiased(precision: str) -> None:
    """Rounding to the nearest repeats the same error of up to half a quantum."""
    draws, generator = 4000, torch.Generator().manual_seed(7)
    tensor = torch.linspace(-1, 1, 23, dtype=torch.float64).expand(draws, 23)
    sent = encode(tensor, precision, generator)
    off = decode(sent, tensor.shape, precision, tensor.dtype).mean(0) - tensor[0]
    deviation = 0.5 / LEVELS[precision] / math.sqrt(draws)  # of the mean, at most
    assert bool((off.abs() < 5 * deviation).all())
    nearest = decode(encode(tensor, precision), tensor.shape, precision, tensor.dtype)
    assert bool(((nearest[0] - tensor[0]).abs() > 10 * deviation).any())


@pytest.mark.parametrize("precision", PRECISIONS)
@given(shapes, st.integers(0, 2**31))
def test_the_predicted_squared_error_equals_the_error_after_decoding(
    precision: str, shape: tuple[int, ...], seed: int
) -> None:
    tensor = normal(shape, seed, torch.float64)
    decoded = decode(encode(tensor, precision), shape, precision, tensor.dtype)
    lost = float((tensor - decoded).square().sum())
    assert squared_error(tensor, precision) == pytest.approx(lost, rel=1e-5, abs=1e-300)


@pytest.mark.parametrize("precision", LEVELS)
def test_the_predicted_squared_error_of_stochastic_rounding_is_its_mean(precision: str) -> None:
    tensor, generator = normal((5, 40), 3), torch.Generator().manual_seed(0)
    lost = [
        float((tensor - decode(sent, (5, 40), precision, tensor.dtype)).double().square().sum())
        for sent in (encode(tensor, precision, generator) for _ in range(400))
    ]
    expected = squared_error(tensor, precision, by_chance=True)
    assert sum(lost) / len(lost) == pytest.approx(expected, rel=0.05)
    assert expected > squared_error(tensor, precision)


def test_halves_are_rounded_to_the_even_neighbour() -> None:
    """Rounding therefore has no bias."""
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert encode(row, "int8")[0].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("precision", LEVELS)
@pytest.mark.parametrize("value", [0.0, 2.0**-149])
def test_a_row_of_zeros_stays_zero(value: float, precision: str) -> None:
    """The other row is not zero. A row that is too small for a scale becomes zero."""
    rows = torch.tensor([[0.0, value], [1.0, -2.0]])
    for generator in (None, torch.Generator()):
        sent = encode(rows, precision, generator)
        back = decode(sent, rows.shape, precision, rows.dtype)
        assert torch.equal(back[0], torch.tensor([0.0, value]) if sent[1][0] else torch.zeros(2))
        assert value or sent[1][0] == 0


@pytest.mark.parametrize("precision", LEVELS)
def test_the_smallest_floats_do_not_wrap_around(precision: str) -> None:
    """Their scale is once or twice the smallest positive float."""
    rows = torch.arange(1, 600.0).unsqueeze(1) * 2.0**-149
    back = decode(encode(rows, precision), rows.shape, precision, rows.dtype)
    assert bool((back >= 0).all())
    assert bool((back <= 2 * rows).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_values_that_the_precision_cannot_represent_are_refused(bad: float, precision: str) -> None:
    """Otherwise NaN would become a number, and a large number would become infinite."""
    tensor = torch.zeros(2, 3, dtype=torch.float64)
    tensor[1, 1] = bad
    with pytest.raises(NonFiniteLossError, match=rf"\[2, 3\].*too large for {precision}"):
        encode(tensor, precision)


QUANTA, SCALES = torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1)
PACKED = torch.ones(2, 2, dtype=torch.uint8)  # 3 values of 4 bits in each row


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
        ((torch.ones(2),), "bfloat16", "expected torch.bfloat16 [2]"),
        ((QUANTA,), "int8", "torch.float32 [2, 1]"),
        ((SCALES, QUANTA), "int8", "torch.float32 [2, 1] and torch.int8 [2, 3], do"),
        ((QUANTA, SCALES, SCALES), "int8", "torch.float32 [2, 1] and torch.float32 [2, 1]"),
        ((QUANTA, torch.ones(2)), "int8", "torch.float32 [2],"),
        ((QUANTA, torch.ones(1, 1)), "int8", "torch.float32 [1, 1],"),
        ((QUANTA, SCALES.double()), "int8", "torch.float64 [2, 1]"),
        ((QUANTA.long(), SCALES), "int8", "torch.int64 [2, 3]"),
        ((QUANTA.repeat(3, 1), SCALES.repeat(3, 1)), "int8", "torch.int8 [6, 3]"),
        ((QUANTA, SCALES), "int4", "torch.int8 [2, 3]"),
        ((PACKED, SCALES), "int6", "torch.uint8 [2, 2]"),
        ((PACKED.char(), SCALES), "int4", "torch.int8 [2, 2]"),
        ((PACKED[:, :1], SCALES), "int4", "torch.uint8 [2, 1]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: tuple[Tensor, ...], precision: str, words: str
) -> None:
    """The error states the received and the expected forms; no value is read or created."""
    shape = (2,) if precision in PRECISIONS[:2] else (2, 3)
    unseen = [tensor.to("meta") for tensor in tensors]
    assert words in refused(unseen, precision, shape)


@pytest.mark.parametrize("bad", [-1e-30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_a_bad_scale_is_refused(bad: float, row: int) -> None:
    scales = torch.ones(2, 1)
    scales[row] = bad
    assert "scales that are negative, NaN or infinite" in refused((QUANTA, scales), "int8")


def test_padding_that_is_not_zero_is_refused() -> None:
    """Otherwise the padding could contain data."""
    packed = PACKED.clone()
    packed[1, 1] = 0x11
    assert "padding is not zero" in refused((packed, SCALES), "int4")


@pytest.mark.parametrize(
    ("precision", "values"),
    [
        ("int8", torch.tensor([[1, -128, 1]] * 2).char()),
        ("int6", torch.tensor([[0, 0x08, 0]] * 2, dtype=torch.uint8)),
        ("int4", torch.tensor([[0x81, 1]] * 2, dtype=torch.uint8)),
    ],
)
def test_a_value_below_all_levels_is_refused(precision: str, values: Tensor) -> None:
    """Two's complement has one more value below 0 than above 0; no encoder sends it."""
    words = f"values of {precision[3:]} bits below {-LEVELS[precision]}"
    assert words in refused((values, SCALES), precision)


@pytest.mark.parametrize("precision", LEVELS)
@given(st.integers(0, 2**31))
def test_rounding_twice_changes_nothing(precision: str, seed: int) -> None:
    """Decoded values are multiples of a quantum already."""
    tensor = normal((3, 5), seed)
    once = decode(encode(tensor, precision), (3, 5), precision, tensor.dtype)
    twice = decode(encode(once, precision), (3, 5), precision, tensor.dtype)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)
    assert all_finite(twice)


def test_numbers_that_become_infinite_are_refused() -> None:
    """Finite scales can give infinite products."""
    assert "too large for torch.float32" in refused((QUANTA * 127, SCALES * 3e38), "int8")
