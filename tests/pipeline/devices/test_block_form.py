"""Blocks that are built from one form."""

import torch
from torch import nn

from pipeline.devices.block_form import BlockForm


def block() -> nn.Module:
    """A block with a frozen weight and buffers of two types."""
    linear = nn.Linear(3, 3)
    linear.weight.requires_grad_(False)
    return nn.Sequential(linear, nn.BatchNorm1d(3))


def test_blocks_of_one_form_use_the_given_weights_and_share_no_module() -> None:
    with torch.device("meta"):
        form = BlockForm({}, frozenset(), block())
    drawn = block()
    trains = {name: each.requires_grad for name, each in drawn.named_parameters()}
    weights = [{k: v.clone() for k, v in drawn.state_dict().items()} for _ in range(2)]
    built = [form.build(each) for each in weights]
    for module, given in zip(built, weights, strict=True):
        held = module.state_dict()
        assert held.keys() == given.keys()
        assert all(held[name].data_ptr() == each.data_ptr() for name, each in given.items())
        assert trains == {name: each.requires_grad for name, each in module.named_parameters()}
    assert not set(built[0].modules()) & set(built[1].modules())
    assert all(each.is_meta for each in form.empty.state_dict().values())


def test_constants_take_memory_and_have_no_gradients() -> None:
    module = nn.Linear(3, 3, bias=False, device="meta")
    module.register_buffer("table", torch.zeros(5), persistent=False)
    form = BlockForm({"weight": module.weight}, frozenset({"weight"}), module)
    assert (form.constant_bytes, form.train_bytes(1)) == (4 * 5, 2 * 4 * 9 + 4 * 5)
