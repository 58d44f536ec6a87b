"""Products with received tensors equal products with the sent tensors bit for bit.

The last bits of a product of a few rows depend on the memory addresses of its operands.
"""

import pytest
import torch
from frame_bytes import encode
from torch import Tensor, nn

from collapipe.models.split import build_empty
from collapipe.tensors import aligned
from collapipe.wire.frames import Frame, FrameKind, decode
from pipeline.devices.block_form import BlockForm

WIDTH = 256


def at(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins ``offset`` bytes after a multiple of 64."""
    memory = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    moved = memory[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
    assert moved.data_ptr() % 64 == offset
    return moved.copy_(tensor)


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_products_with_a_received_activation_are_bit_identical(rows: int) -> None:
    """The position of the activation in its frame does not matter."""
    sent = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    layer = nn.Linear(WIDTH, WIDTH)
    for first in range(1, 9):
        mask = torch.ones(first, 8, dtype=torch.bool)  # shifts the next tensor by 8 bytes each time
        frame = Frame(FrameKind.ACTIVATION, 1, 2, 3, (mask, sent, sent[:1].double()))
        _, hidden, wide = decode(bytearray(encode(frame))).tensors
        assert hidden.data_ptr() % 64 == wide.data_ptr() % 64 == 0
        assert torch.equal(hidden, sent) and torch.equal(wide, sent[:1].double())
        assert torch.equal(layer(hidden[0]), layer(sent[0]))


def test_a_module_computes_the_same_for_any_address_of_its_weights() -> None:
    expected, inputs = nn.Linear(WIDTH, 1000), torch.randn(1, WIDTH)
    for offset in range(0, 64, 8):
        moved = {name: at(each, offset) for name, each in expected.state_dict().items()}
        form = BlockForm({}, frozenset(), nn.Linear(WIDTH, 1000, device="meta"))
        built = build_empty(lambda: nn.Linear(WIDTH, 1000), moved), form.build(moved)
        for module in built:
            assert all(each.data_ptr() % 64 == 0 for each in module.parameters())
            assert torch.equal(module(inputs), expected(inputs))


def test_aligned_tensors_are_not_copied() -> None:
    tensor = torch.zeros(3)
    assert aligned(tensor) is tensor
    assert aligned(at(tensor, 8)).data_ptr() % 64 == 0
    narrow = at(torch.zeros(4), 8).view(torch.bfloat16)
    assert aligned(narrow) is narrow  # products use a wider copy
    assert aligned(torch.empty(0)).numel() == 0
    assert aligned(torch.empty(3, device="meta")).is_meta
