"""Optimiser steps have the bits of torch's optimisers."""

import pytest
import torch
from sections import optimizer_settings
from torch import nn

from collapipe.models.part import Optimizer, moments, state_like
from collapipe.sections import OptimizerSettings

ADAMW = optimizer_settings(
    "adamw", lr=0.3, beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.02, momentum=0.7
)
MOMENTUM = optimizer_settings("sgd", lr=0.3, momentum=0.7, weight_decay=0.02)
SGD = optimizer_settings("sgd", lr=0.3, momentum=0.0, weight_decay=0.02)
each_kind = pytest.mark.parametrize("settings", [ADAMW, MOMENTUM, SGD], ids=["adamw", "sgd", "0"])


def torch_optimizer(settings: OptimizerSettings, module: nn.Module) -> torch.optim.Optimizer:
    """Torch's optimiser with the same settings."""
    weights, decay = list(module.parameters()), settings.weight_decay
    if settings.name == "sgd":
        how = {"lr": 9.0, "momentum": settings.momentum, "weight_decay": decay}
        return torch.optim.SGD(weights, **how, fused=True)  # type: ignore[arg-type]
    betas = settings.beta1, settings.beta2
    return torch.optim.AdamW(weights, 9.0, betas, eps=settings.eps, weight_decay=decay, fused=True)


def modules(count: int) -> list[nn.Module]:
    """Equal small modules, with a frozen weight and a layer that is never used."""
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        made.append(
            nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.LayerNorm(7), "c": nn.Linear(1, 1)})
        )
        made[-1].get_parameter("b.weight").requires_grad_(False)
    return list(made)


def forward(module: nn.Module, step: int) -> None:
    """Gradients that depend on the weights."""
    assert isinstance(module, nn.ModuleDict)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3, 5, generator=generator)
    module["b"](module["a"](x)).square().mean().backward()


@each_kind
def test_steps_and_state_equal_those_of_torch(settings: OptimizerSettings) -> None:
    """Each step has its own learning rate and clears the gradients."""
    mine, theirs = modules(2)
    optimizer, oracle = Optimizer(settings, mine), torch_optimizer(settings, theirs)
    for step, rate in enumerate((0.1, 0.5, 0.0, 0.2)):
        forward(mine, step)
        forward(theirs, step)
        oracle.param_groups[0]["lr"] = rate
        oracle.step()
        oracle.zero_grad()
        optimizer.step(rate)
        assert all(weight.grad is None for weight in mine.parameters())
    for name, weight in mine.named_parameters():
        assert torch.equal(weight, theirs.get_parameter(name)), name
    expected = {
        f"{name}/{key}": each
        for name, weight in theirs.named_parameters()
        for key, each in oracle.state.get(weight, {}).items()
        if each is not None
    }
    assert optimizer.state().keys() == expected.keys()
    assert all(torch.equal(each, expected[key]) for key, each in optimizer.state().items())


@each_kind
def test_a_weight_may_get_its_first_gradient_after_others_stepped(
    settings: OptimizerSettings,
) -> None:
    """It then steps as if it were alone."""
    (module,) = modules(1)
    late, alone = module.get_parameter("c.weight"), nn.ParameterDict({"c": torch.ones(1, 1)})
    alone["c"].data = late.detach().clone()
    optimizer, oracle = Optimizer(settings, module), Optimizer(settings, alone)
    forward(module, 0)
    optimizer.step(0.1)
    for step in (1, 2):
        forward(module, step)
        late.grad, alone["c"].grad = torch.full((1, 1), 0.5), torch.full((1, 1), 0.5)
        optimizer.step(0.1)
        oracle.step(0.1)
    assert torch.equal(late, alone["c"])


@each_kind
def test_state_like_predicts_names_shapes_and_types_of_the_state(
    settings: OptimizerSettings,
) -> None:
    (module,) = modules(1)
    optimizer = Optimizer(settings, module)
    forward(module, 0)
    optimizer.step(0.1)
    stepped = {n: p for n, p in module.named_parameters() if n in ("a.weight", "a.bias", "b.bias")}
    like = state_like(settings, stepped)
    found = {key: (each.shape, each.dtype) for key, each in optimizer.state().items()}
    assert found == {key: (each.shape, each.dtype) for key, each in like.items()}
    assert {key.rpartition("/")[2] for key in found} - {"step"} == set(moments(settings))


def test_state_of_unknown_or_frozen_weights_is_ignored() -> None:
    (module,) = modules(1)
    optimizer = Optimizer(ADAMW, module)
    optimizer.load_state({"scale/exp_avg": torch.ones(2), "b.weight/exp_avg": torch.ones(7)})
    assert optimizer.state() == {}
