"""Unit and server remember the same activations, which approach the unit's true activations."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.errors import WireError
from collapipe.tensors import Tensors
from collapipe.wire.compression.codec import layout
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder

DIM, NUM_ROWS = 5, 6
PRECISIONS = ["float32", "bfloat16", "int8", "int6", "int4"]
batches = st.lists(
    st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(0, 3)), min_size=1, max_size=5)
    .map(lambda pairs: list(dict(pairs).items()))
    .filter(lambda pairs: any(count for _, count in pairs)),
    min_size=1,
    max_size=4,
)


def coder(known: ActivationMemory | None = None, round_: int = 1) -> ChangeCoder:
    return ChangeCoder(known or ActivationMemory(), round_, NUM_ROWS)


def send(
    unit: ChangeCoder,
    server: ChangeCoder,
    activation: Tensor,
    rows: Sequence[int],
    counts: Sequence[int],
    precision: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The activation that the server decodes, and the tensors that the unit sent."""
    counted = torch.tensor(counts)
    generator = torch.Generator().manual_seed(0)
    sent = unit.encode(activation, torch.tensor(rows), counted, precision, generator)
    return server.decode(sent, counted, DIM, precision, activation.dtype), sent


def same(first: ActivationMemory, second: ActivationMemory) -> bool:
    return (first.round, first.rows.keys()) == (second.round, second.rows.keys()) and all(
        torch.equal(tokens, second.rows[row]) for row, tokens in first.rows.items()
    )


@given(
    batches, batches, st.sampled_from(PRECISIONS), st.sampled_from([torch.float32, torch.float64])
)
def test_both_ends_remember_the_same_activations(
    first: list[list[tuple[int, int]]],
    second: list[list[tuple[int, int]]],
    precision: str,
    dtype: torch.dtype,
) -> None:
    """Any rows are sent in two successive rounds."""
    unit, server, total = coder(), coder(), dict[int, Tensor]()
    for round_, steps in ((1, first), (2, second)):
        if round_ == 2:
            known = [each.known.after(each.arrived) for each in (unit, server)]
            unit, server = (coder(each, round_) for each in known)
        for step in steps:
            rows, counts = map(list, zip(*step, strict=True))
            activation = torch.randn(sum(counts), DIM).to(dtype)
            arrived, (_, *parts) = send(unit, server, activation, rows, counts, precision)
            forms = tuple((each.dtype, tuple(each.shape)) for each in parts)
            assert forms == layout(activation.shape, dtype, precision)
            if precision == "float32":
                assert torch.equal(arrived, activation)
            total |= dict(zip(rows, torch.split(arrived, counts), strict=True))
    assert same(unit.arrived, server.arrived)
    assert same(unit.known, server.known)
    assert same(server.known.after(server.arrived), ActivationMemory(2, total))
    assert all(  # memory holds only the remembered rows
        tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()
        for tokens in server.arrived.rows.values()
    )


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int6", "int4"])
def test_the_error_of_an_unchanged_row_shrinks_with_each_step(precision: str) -> None:
    """In the end, only the last bits are wrong."""
    unit, server, activation = coder(), coder(), torch.randn(4, DIM)
    errors = []
    for _ in range(20):
        arrived, _ = send(unit, server, activation, [2, 0], [3, 1], precision)
        errors.append(float((arrived - activation).square().sum()))
    assert errors[1] < 0.2 * errors[0]
    assert errors[-1] < 1e-10


@pytest.mark.parametrize(
    ("before", "now", "whole"),
    [
        (torch.ones(2, DIM), 1.1 * torch.ones(2, DIM), [False]),
        (torch.ones(2, DIM), -torch.ones(2, DIM), [True]),
        (torch.ones(1, DIM), torch.ones(2, DIM), [True]),
        (torch.ones(2, DIM), torch.zeros(2, DIM), [True]),
    ],
    ids=["nearer", "farther", "more tokens", "zeros"],
)
def test_a_row_is_sent_whole_or_as_a_change_whichever_is_smaller(
    before: Tensor, now: Tensor, whole: list[bool]
) -> None:
    unit, server = coder(), coder()
    send(unit, server, before, [4], [len(before)], "int8")
    _, (numbers, *_) = send(unit, server, now, [4], [len(now)], "int8")
    assert (numbers < 0).tolist() == whole


def test_a_unit_with_fewer_stored_rows_than_the_server_sends_whole_rows() -> None:
    """The server's older values of these rows do not matter."""
    stale = ActivationMemory(3, {0: torch.full((1, DIM), 9.0), 1: torch.full((1, DIM), 9.0)})
    unit, server = coder(round_=4), coder(stale, round_=4)
    for _ in range(2):
        activation = torch.randn(1, DIM)
        arrived, _ = send(unit, server, activation, [0], [1], "int8")
        assert (arrived - activation).abs().max() < 0.05
    after = unit.known.after(unit.arrived)
    assert torch.equal(server.known.after(server.arrived).rows[0], after.rows[0])


ZEROS = torch.zeros(3, DIM)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (torch.tensor([~0, ~NUM_ROWS]), "0 … 5"),
        (torch.tensor([~0, NUM_ROWS]), "0 … 5"),
        (torch.tensor([~0, 2**63 - 1]), "0 … 5"),
        (torch.tensor([~0, -(2**63)]), "0 … 5"),
        (torch.tensor([~0, ~0]), "different"),
        (torch.tensor([1, ~1]), "different"),
        (torch.tensor([~0, 2]), "delta for row 2 without a base"),
        (torch.tensor([~0, 3]), "delta for row 3 without a base"),
        (torch.tensor([~0, 1]), "too large"),
        (torch.tensor([~0, ~1, ~2]), "do not fit"),
        (torch.tensor([[~0, ~1]]), "do not fit"),
        (torch.tensor([~0, ~1]).int(), "do not fit"),
        (torch.tensor([~0, ~1]).double(), "do not fit"),
    ],
)
def test_invalid_row_numbers_are_refused(numbers: Tensor, message: str) -> None:
    """Row 1 has large values, row 3 another number of tokens; the server remembers no row."""
    large = torch.full((2, DIM), 3e38)
    server = coder(ActivationMemory(1, {1: large, 3: large[:1]}), 2)
    with pytest.raises(WireError, match=message):
        server.decode(
            (numbers, torch.full((3, DIM), 3e38)),
            torch.tensor([1, 2]),
            DIM,
            "float32",
            torch.float32,
        )
    assert not server.arrived.rows


def test_parts_that_do_not_fit_are_refused() -> None:
    server, counts = coder(), torch.tensor([1, 2])
    for parts in ((), (ZEROS[:2],), (ZEROS.double(),), (ZEROS, ZEROS)):
        with pytest.raises(WireError, match="do not fit"):
            server.decode((torch.tensor([~0, ~1]), *parts), counts, DIM, "float32", torch.float32)
    assert not server.arrived.rows


def test_a_memory_agrees_only_with_the_round_that_the_server_names() -> None:
    before = ActivationMemory(3, {0: torch.zeros(1, DIM), 1: torch.zeros(1, DIM)})
    later = ActivationMemory(5, {1: torch.ones(1, DIM)})
    assert same(before.agreed(later, 3), before)
    assert same(before.agreed(later, 5), ActivationMemory(5, {**before.rows, **later.rows}))
    for round_ in (0, 2, 4, 6):
        assert same(before.agreed(later, round_), ActivationMemory())
    assert same(before.agreed(ActivationMemory(), 0), ActivationMemory())


MEMORY = ActivationMemory(
    7, {4: torch.randn(2, DIM), 0: torch.randn(0, DIM), 2: torch.randn(1, DIM)}
)


@pytest.mark.parametrize("memory", [ActivationMemory(), MEMORY])
def test_a_packed_memory_is_read_back_unchanged(memory: ActivationMemory) -> None:
    assert same(ActivationMemory.unpack(memory.pack(), DIM, torch.float32), memory)


def _put(name: str, value: Tensor) -> Callable[[Tensors], None]:
    return lambda packed: packed.update({name: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed.pop("rows"),
        _put("more", torch.zeros(1)),
        _put("round", torch.tensor(0)),
        _put("round", torch.tensor([7])),
        _put("round", torch.tensor(7.0)),
        _put("rows", torch.tensor([4, 0, 4])),
        _put("rows", torch.tensor([4, 0, -2])),
        _put("rows", torch.tensor([4, 0])),
        _put("rows", torch.tensor([[4, 0, 2]])),
        _put("counts", torch.tensor([2, 0, 2])),
        _put("counts", torch.tensor([4, -2, 1])),
        _put("counts", torch.tensor([2**62, 2**62, 2**63 - 1])),
        _put("counts", torch.tensor([2.0, 0.0, 1.0])),
        _put("tokens", torch.zeros(3, DIM + 1)),
        _put("tokens", torch.zeros(3, DIM).double()),
        _put("tokens", torch.zeros(3 * DIM)),
        _put("tokens", torch.full((3, DIM), torch.nan)),
    ],
)
def test_an_invalid_memory_is_refused(damage: Callable[[Tensors], None]) -> None:
    packed = MEMORY.pack()
    damage(packed)
    with pytest.raises(WireError):
        ActivationMemory.unpack(packed, DIM, torch.float32)
