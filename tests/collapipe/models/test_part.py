"""Parts that train separately take the steps of one optimiser over the whole model."""

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sections import optimizer_settings
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from collapipe.errors import NonFiniteLossError
from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.part import (
    HeadPart,
    Part,
    clip_scale,
    prefixed,
    select,
)
from collapipe.models.transformer import Decoder, TransformerSpec
from collapipe.sections import OptimizerSettings
from collapipe.tensors import IGNORED
from collapipe.text.vocabulary import Vocabulary

SETTINGS = [
    optimizer_settings("adamw", lr=0.1, weight_decay=0.1),
    optimizer_settings("sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
    optimizer_settings("sgd", lr=0.1),
]
each_optimizer = pytest.mark.parametrize(
    "settings", SETTINGS, ids=["adamw", "momentum", "plain sgd"]
)
finite = st.floats(-1e6, 1e6)


def linear(seed: int = 0) -> nn.Linear:
    """A small module."""
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def give_gradients(module: nn.Module, seed: int) -> None:
    """Set random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Assert equal names and bits."""
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@given(st.lists(st.lists(finite, min_size=1), min_size=1, max_size=5), st.floats(1e-3, 1e6))
def test_clip_scale_equals_that_of_torch(parts: list[list[float]], clip_norm: float) -> None:
    """The scale from the parts' squared norms equals torch's scale from all gradients at once."""
    parameters = [nn.Parameter(torch.ones(len(part), dtype=torch.float64)) for part in parts]
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = torch.tensor(part, dtype=torch.float64)
    squared_norms = [sum(x * x for x in part) for part in parts]
    scale = clip_scale(squared_norms, clip_norm)
    assert scale <= 1
    clip_grad_norm_(parameters, clip_norm)
    for parameter, part in zip(parameters, parts, strict=True):
        expected = torch.tensor(part, dtype=torch.float64) * scale
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=0)


def test_clip_scale_without_a_limit_without_gradients_and_at_the_limit() -> None:
    assert clip_scale([9.0, 16.0], None) == 1
    assert clip_scale([0.0], 1.0) == 1
    assert clip_scale([], 1.0) == 1
    assert clip_scale([9.0, 16.0], 5.0) == pytest.approx(1, abs=1e-6)
    assert clip_scale([9.0, 16.0], 2.5) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_an_error(bad: float, clip_norm: float | None) -> None:
    """With and without clipping, because no weight may become NaN."""
    with pytest.raises(NonFiniteLossError, match=f"norm is {bad}"):
        clip_scale([1.0, bad, 1.0], clip_norm)


@each_optimizer
def test_a_part_with_loaded_weights_and_state_takes_the_same_steps(
    settings: OptimizerSettings,
) -> None:
    """The part has the bits of the uninterrupted part; state of other parts is ignored."""
    stayed = Part("blocks.3", linear(), settings)
    for seed in range(2):
        give_gradients(stayed.module, seed)
        stayed.step(0.05, 1.0)
    weights = select({k: v.clone() for k, v in stayed.weights().items()}, "blocks.3")
    state = {name: tensor.clone() for name, tensor in stayed.optimizer_state().items()}
    others = {"blocks.30.weight/exp_avg": torch.ones(2, 3), "head.bias/exp_avg": torch.ones(2)}
    moved = Part("blocks.3", linear(1), settings, state | others)
    moved.module.load_state_dict(weights)
    assert_equal(moved.optimizer_state(), state)
    assert bool(state) == (settings.name == "adamw" or settings.momentum > 0)
    for seed in range(2, 4):
        for part in (stayed, moved):
            give_gradients(part.module, seed)
            part.step(0.05, 1.0)
    assert_equal(moved.weights(), stayed.weights())
    assert_equal(moved.optimizer_state(), stayed.optimizer_state())


def test_optimizer_state_is_named_after_the_weights() -> None:
    """The names let the state move together with the weights."""
    part = Part("blocks.3", linear(), SETTINGS[0])
    assert part.optimizer_state() == {}
    give_gradients(part.module, 0)
    part.step(0.1, 1.0)
    quantities = ("step", "exp_avg", "exp_avg_sq")
    assert set(part.optimizer_state()) == {
        f"blocks.3.{name}/{quantity}" for name in ("weight", "bias") for quantity in quantities
    }


def test_loaded_state_is_a_copy() -> None:
    """The loaded tensors do not change while the part trains."""
    first = Part("head", linear(), SETTINGS[0])
    give_gradients(first.module, 0)
    first.step(0.1, 1.0)
    state = {name: tensor.clone() for name, tensor in first.optimizer_state().items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    second = Part("head", linear(), SETTINGS[0], state)
    give_gradients(second.module, 1)
    second.step(0.1, 1.0)
    assert_equal(state, kept)
    assert not torch.equal(second.optimizer_state()["head.bias/exp_avg"], kept["head.bias/exp_avg"])


def test_a_step_scales_and_clears_the_gradients() -> None:
    """The learning rate is the step's argument, not the settings' rate."""
    part = Part("head", linear(), SETTINGS[2])
    before = {name: tensor.clone() for name, tensor in part.weights().items()}
    give_gradients(part.module, 0)
    gradients = {f"head.{name}": p.grad for name, p in part.module.named_parameters()}
    expected = {
        name: before[name] - 0.5 * 0.25 * gradient.clone()
        for name, gradient in gradients.items()
        if gradient is not None
    }
    part.step(rate=0.5, scale=0.25)
    for name, weight in part.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-15)
    assert [parameter.grad for parameter in part.module.parameters()] == [None, None]
    assert part.squared_norm() == 0


def test_the_squared_norm_covers_all_weights_of_a_part() -> None:
    """It is 0 if no gradient was accumulated."""
    part = Part("head", linear(), SETTINGS[0])
    assert part.squared_norm() == 0
    part.module.get_parameter("bias").grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert part.squared_norm() == pytest.approx(25)
    part.module.get_parameter("weight").grad = torch.full((2, 3), 2.0, dtype=torch.float64)
    assert part.squared_norm() == pytest.approx(49)
    part.forget_gradients()
    assert part.squared_norm() == 0


def test_a_part_puts_its_module_into_training_mode() -> None:
    """The module was in evaluation mode before."""
    assert Part("head", linear().eval(), SETTINGS[0]).module.training


def test_names_with_a_common_prefix_are_distinguished() -> None:
    """``blocks.1`` is not ``blocks.10``; ``select`` undoes ``prefixed``."""
    one, ten = {"weight": torch.ones(1)}, {"weight": torch.zeros(1)}
    tensors = prefixed("blocks.1", one) | prefixed("blocks.10", ten)
    assert list(tensors) == ["blocks.1.weight", "blocks.10.weight"]
    assert_equal(select(tensors, "blocks.1"), one)
    assert_equal(select(tensors, "blocks.10"), ten)
    assert select(tensors, "blocks") == {
        "1.weight": tensors["blocks.1.weight"],
        "10.weight": tensors["blocks.10.weight"],
    }


def test_losses_and_gradients_of_micro_batches_sum_to_those_of_the_batch() -> None:
    """The head divides each micro-batch's loss and gradients by the batch's number of target
    tokens."""
    spec = TransformerSpec(1, 1, 16, 2, 24, dropout=0.0)
    torch.manual_seed(0)
    whole = Decoder(spec, Vocabulary(9, 0, 1, 2)).double()
    part = HeadPart("head", deepcopy(whole), SETTINGS[0])
    hidden = torch.randn(3, 4, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    targets = torch.tensor([[3, 4, 2], [5, 2, IGNORED], [2, IGNORED, IGNORED]])
    expected = whole.loss(hidden, mask, targets) / 6
    expected.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    generator, total = torch.Generator(), 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        given_ = hidden[rows].detach()
        loss, gradient = part.answer(given_, mask[rows], targets[rows], 6, generator)
        assert not given_.requires_grad
        torch.testing.assert_close(gradient, hidden.grad[rows], rtol=0, atol=1e-12)
        total += loss
    assert total == pytest.approx(expected.item(), abs=1e-12)
    for own, theirs in zip(part.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=1e-12)


def test_dropout_of_the_head_uses_the_given_generator() -> None:
    """The generator depends only on the key and the micro-batch."""
    spec = TransformerSpec(1, 1, 16, 2, 24, dropout=0.3)
    part = HeadPart("head", Decoder(spec, Vocabulary(9, 0, 1, 2)), SETTINGS[0])
    hidden, mask = torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.bool)
    targets, key = torch.tensor([[3, 2], [4, 2]]), DropoutKey(1, 2, 3)
    losses = [
        part.answer(hidden, mask, targets, 4, key.generator("head", micro_batch))[0]
        for micro_batch in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]
    with drawing_from(key.generator("head", 0)):
        assert isinstance(part.module, Decoder)
        expected = part.module.loss(hidden, mask, targets) / 4
    assert losses[0] == expected.item()
