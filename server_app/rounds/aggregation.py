"""Weights or pseudo-gradients of the units → the new model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from collapipe.sections import ServerOptimizerSettings
from collapipe.tensors import Tensors


def average(models: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Σₙ wₙ θₙ / Σₙ wₙ, name by name and in the models' order (FedAvg).

    Whole numbers and truth values, such as a buffer that counts, have no average: they are those of
    the first model.
    """
    total = sum(weights)
    averaged = {
        name: tensor * (weights[0] / total) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in models[0].items()
    }
    for model, weight in zip(models[1:], weights[1:], strict=True):
        for name, tensor in averaged.items():
            if tensor.is_floating_point():
                tensor.add_(model[name], alpha=weight / total)
    return averaged


class ServerOptimizer:
    """A step on the pseudo-gradient θ(t) − average; its memory lasts for the run.

    ``fedavg`` takes the average itself. With one local step of plain SGD that is eqs. (6)–(9).
    Weights that are not floating-point numbers are taken from the average in any case.
    """

    def __init__(self, settings: ServerOptimizerSettings) -> None:
        self._settings = settings
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Tensors = {}
        self._restored: Tensors = {}

    @property
    def state(self) -> Tensors:
        """Its memory: ``NAME/exp_avg`` of the weight ``NAME``."""
        if self._optimizer is None:
            return self._restored
        return {
            f"{name}/{quantity}": value
            for name, parameter in self._parameters.items()
            for quantity, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def restore(self, state: Tensors) -> None:
        """Go on with the memory that ``state`` was; before the first step."""
        assert self._optimizer is None, "restore after a step"
        self._restored = state

    def step(self, previous: Tensors, averaged: Tensors) -> Tensors:
        """The new model from the round's first weights and the units' average."""
        if self._settings.name == "fedavg":
            return averaged
        if self._optimizer is None:
            self._parameters = {
                name: tensor.clone()
                for name, tensor in previous.items()
                if tensor.is_floating_point()
            }
            self._optimizer = _build(self._settings, list(self._parameters.values()))
            for key, value in self._restored.items():
                name, _, quantity = key.rpartition("/")
                self._optimizer.state[self._parameters[name]][quantity] = value.clone()
        for name, parameter in self._parameters.items():
            parameter.copy_(previous[name])
            parameter.grad = previous[name] - averaged[name]
        self._optimizer.step()
        stepped = {name: parameter.clone() for name, parameter in self._parameters.items()}
        return {**averaged, **stepped}


def _build(settings: ServerOptimizerSettings, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if settings.name == "adam":
        betas = (settings.momentum, settings.beta2)
        return torch.optim.Adam(parameters, lr=settings.lr, betas=betas, eps=settings.eps)
    momentum = settings.momentum if settings.name == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=momentum)
