"""All changes of weights arrive in the end; tensors that were not requested are refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.errors import NonFiniteLossError, WireError
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.compression.codec import compress_update, expected, restore

LARGEST = {"bfloat16": 0.05, "int8": 0.05, "int6": 0.2, "int4": 0.9}  # residual of normal changes
ROUNDED = list(LARGEST)


def weights(seed: int) -> Tensors:
    """A matrix, a vector, a scalar and a buffer of integers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "linear.weight": torch.randn(3, 5, generator=generator),
        "linear.bias": torch.randn(3, generator=generator).double(),
        "gain": torch.randn((), generator=generator),
        "steps": torch.randint(9, (2,), generator=generator),
    }


def over_the_wire(tensors: Tensors) -> Tensors:
    """The tensors after they were packed as numpy arrays and unpacked."""
    return records.unpack_tensors(records.pack_tensors(tensors))


def test_float32_sends_the_weights_themselves() -> None:
    """The restored weights are bit-identical."""
    start, end = weights(1), weights(2)
    sent, residual = compress_update(start, end, {}, "float32")
    assert residual == {}
    restored = restore(over_the_wire(sent), start, "float32", "unit 0")
    assert restored.keys() == end.keys()
    assert all(torch.equal(restored[name], end[name]) for name in end)


@pytest.mark.parametrize("precision", ROUNDED)
def test_restored_weights_plus_the_residual_equal_the_weights(precision: str) -> None:
    """Dtypes are kept, and integers are exact."""
    start, end = weights(1), weights(2)
    sent, residual = compress_update(start, end, {}, precision)
    restored = restore(over_the_wire(sent), start, precision, "unit 0")
    assert torch.equal(restored.pop("steps"), end.pop("steps"))
    assert restored.keys() == residual.keys() == end.keys()
    for name, value in restored.items():
        assert value.dtype == residual[name].dtype == end[name].dtype
        torch.testing.assert_close(value + residual[name], end[name])
        assert not torch.equal(value, end[name]) or name == "gain"


@pytest.mark.parametrize("precision", ["float32", *ROUNDED])
def test_the_size_of_the_payload_is_known_before_encoding(precision: str) -> None:
    """The size is exact."""
    start, end = weights(1), weights(2)
    sent, _ = compress_update(start, end, {}, precision)
    assert records.num_bytes(over_the_wire(sent)) == records.num_bytes(expected(start, precision))


def test_names_and_dtypes_of_the_sent_tensors() -> None:
    """All dtypes exist in numpy; each quantised tensor has a scale."""
    sent, _ = compress_update(weights(1), weights(2), {}, "int8")
    assert {name: tensor.dtype for name, tensor in sent.items() if "linear" in name} == {
        "linear.weight": torch.int8,
        "linear.weight/scale": torch.float32,
        "linear.bias": torch.int8,
        "linear.bias/scale": torch.float32,
    }
    sent, _ = compress_update(weights(1), weights(2), {}, "bfloat16")
    assert {tensor.dtype for tensor in sent.values()} == {torch.int16, torch.int64}


@pytest.mark.parametrize("precision", ROUNDED)
@given(st.integers(0, 2**31), st.integers(1, 8))
def test_arrived_changes_plus_the_last_residual_equal_all_changes(
    precision: str, seed: int, rounds: int
) -> None:
    """The number of rounds is arbitrary; each round has new start weights."""
    generator = torch.Generator().manual_seed(seed)
    changed = arrived = torch.zeros(4, 6, dtype=torch.float64)
    residual: Tensors = {}
    for _ in range(rounds):
        start, end = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        sent, residual = compress_update({"w": start}, {"w": end}, residual, precision)
        changed = changed + end - start
        arrived = arrived + restore(sent, {"w": start}, precision, "unit 0")["w"] - start
    torch.testing.assert_close(arrived + residual["w"], changed, rtol=0, atol=1e-12)
    assert residual["w"].abs().max() < LARGEST[precision]  # the residual does not grow


@given(st.lists(st.sampled_from(["float32", *ROUNDED]), min_size=1, max_size=6))
def test_all_changes_arrive_if_each_round_has_another_precision(precisions: list[str]) -> None:
    """A round with float32 leaves no residual."""
    generator = torch.Generator().manual_seed(0)
    changed = arrived = torch.zeros(4, 6, dtype=torch.float64)
    residual: Tensors = {}
    for precision in precisions:
        start, end = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        sent, residual = compress_update({"w": start}, {"w": end}, residual, precision)
        changed = changed + end - start
        arrived = arrived + restore(sent, {"w": start}, precision, "unit 0")["w"] - start
        pending = residual.get("w", torch.zeros(4, 6, dtype=torch.float64))
        torch.testing.assert_close(arrived + pending, changed, rtol=0, atol=1e-12)
    assert (precisions[-1] == "float32") == (not residual)


def descend(gradient: Tensor, precision: str, *, with_feedback: bool) -> Tensor:
    """The weight after 100 rounds from 0 with a constant gradient."""
    weight, residual = {"w": torch.zeros_like(gradient)}, {}
    for _ in range(100):
        end = {"w": weight["w"] - 0.01 * gradient}
        sent, lacking = compress_update(weight, end, residual, precision)
        weight = restore(sent, weight, precision, "unit 0")
        residual = lacking if with_feedback else {}
    return weight["w"]


def test_changes_below_half_a_quantum_arrive_only_with_feedback() -> None:
    """A large gradient hides a small one in its row. Without feedback, the small one is lost."""
    gradient = torch.tensor([1.0, 0.003])
    arrived = descend(gradient, "int8", with_feedback=True)
    torch.testing.assert_close(arrived, -gradient, rtol=1e-5, atol=0.01 / 254)
    assert arrived[1] != 0
    assert descend(gradient, "int8", with_feedback=False)[1] == 0


def test_rounding_errors_of_bfloat16_do_not_add_up_with_feedback() -> None:
    """Without feedback, the same change is rounded in the same direction in every round."""
    gradient = torch.tensor([1.0])
    off = [
        (descend(gradient, "bfloat16", with_feedback=feedback) + gradient).abs()
        for feedback in (True, False)
    ]
    assert off[0] < 0.01 * 2**-8 < 10 * 0.01 * 2**-8 < off[1]


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_change_that_is_not_finite_is_refused_by_the_unit(precision: str, bad: float) -> None:
    """NaN and infinity are not encoded as finite numbers."""
    start, end = weights(1), weights(2)
    end["linear.bias"][1] = bad
    with pytest.raises(
        NonFiniteLossError, match=r"the change of linear.bias: .*NaN.*; lower optimizer.lr"
    ):
        compress_update(start, end, {}, precision)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("linear.weight/scale", None, "other weights than asked for: linear.weight/scale"),
        ("linear.odd", torch.ones(1), "other weights than asked for: linear.odd"),
        ("steps/scale", torch.ones(1), "other weights than asked for: steps/scale"),
        ("linear.weight", torch.ones(3, 5), "linear.weight as torch.float32 [3, 5]"),
        ("linear.weight", torch.ones(3, 4).char(), "linear.weight as torch.int8 [3, 4]"),
        ("linear.weight/scale", torch.ones(3), "linear.weight/scale as torch.float32 [3]"),
        ("gain/scale", torch.tensor(math.nan), "gain with scales that are negative, NaN"),
        ("gain/scale", torch.tensor(-1.0), "gain with scales that are negative"),
        ("gain/scale", torch.tensor(3e38), "gain with values and scales whose products"),
    ],
)
def test_tensors_that_were_not_requested_are_refused(
    name: str, value: Tensor | None, words: str
) -> None:
    """The error names the unit and the tensor in one line."""
    start = weights(1)
    sent, _ = compress_update(start, weights(2), {}, "int8")
    if value is None:
        del sent[name]
    else:
        sent[name] = value
    with pytest.raises(WireError) as caught:
        restore(sent, start, "int8", "unit 7")
    message = str(caught.value)
    assert message.startswith("unit 7 sent ")
    assert words in message
    assert "\n" not in message


def test_bits_of_an_infinite_number_are_refused() -> None:
    """An int16 is always finite, but its bits as a bfloat16 may be infinite."""
    start = weights(1)
    sent, _ = compress_update(start, weights(2), {}, "bfloat16")
    sent["linear.bias"][2] = 0x7F80
    with pytest.raises(WireError, match=r"unit 7 sent linear.bias with values .* infinite"):
        restore(sent, start, "bfloat16", "unit 7")
