"""The model between rounds: one of all units, or each unit's own where nothing is averaged."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.config import Settings
from collapipe.errors import Called, NonFiniteLossError, unit_called
from collapipe.models.part import select
from collapipe.models.split import EMBEDDING, HEAD, block_name
from collapipe.sections import ServerOptimizerSettings
from collapipe.tensors import Tensors, not_finite


class GlobalModel:
    """Weights as the last round left them; those named ``frozen`` never change.

    ``weights`` are the average. Where nothing is averaged they are the first ones, and
    ``own_models`` has the weights of each unit once it has trained.
    """

    def __init__(self, settings: Settings, frozen: Collection[str]) -> None:
        self._settings, self.frozen = settings, frozenset(frozen)
        self.weights: Tensors = {}
        self.own_models: dict[int, Tensors] = {}
        self._how = settings.server_optimizer
        self.server_optimizer = ServerOptimizer(self._how)

    def of_unit(self, unit: int) -> Tensors:
        """What a unit's next round starts from."""
        return self.own_models.get(unit, self.weights)

    def names(self, with_head: bool) -> set[str]:
        """Names of the weights that a unit gets and returns, ``with_head`` if that trains there."""
        names = self.weights.keys() - self.frozen
        return {name for name in names if with_head or not name.startswith(f"{HEAD}.")}

    def frozen_parts(self) -> dict[str, Tensors]:
        """Frozen weights of the parts that units hold, of all where they evaluate: part →
        tensors."""
        weights = {name: self.weights[name] for name in self.weights if name in self.frozen}
        blocks = map(block_name, range(self._settings.model.num_blocks))
        with_head = self._settings.units_have_heads or self._settings.evaluation.on_units
        head = [HEAD] if with_head else []
        parts = {name: select(weights, name) for name in (EMBEDDING, *blocks, *head)}
        return {name: tensors for name, tensors in parts.items() if tensors}

    def learn(
        self,
        round_: int,
        models: Mapping[int, Tensors],
        shares: Mapping[int, float],
        common: Tensors,
        called: Called = unit_called,
    ) -> float | None:
        """Make one of the units' ``models``, or let each unit keep its own.

        ``shares`` are the units' weights in the average, not normalised; ``common`` are tensors
        that the units shared in the round, in place of an average. Returns ‖θ(t+1) - θ(t)‖, None
        where nothing is averaged. Raises ``NonFiniteLossError`` where a new weight is not finite;
        the model is then what it was.
        """
        trained = {unit: self._trained(model) for unit, model in models.items()}
        if not self._settings.framework.aggregate:
            for unit, model in trained.items():
                _check_finite(model, f"round {round_}: {called(unit)}'s")
            own = {unit: {**self.of_unit(unit), **model} for unit, model in trained.items()}
            self.own_models = {**self.own_models, **own}
            return None
        averaged = combined(list(trained.values()), [shares[u] for u in trained], self._how)
        return self.move(round_, averaged | self._trained(common))

    def move(self, round_: int, averaged: Tensors) -> float:
        """Let the server's optimiser take its step towards the average of the weights that train.
        Returns and raises as ``learn``."""
        start = self.trained
        new = {**self.weights, **self.server_optimizer.step(start, averaged)}
        _check_finite(new, f"round {round_}:")
        self.weights = new
        changes = (new[name] - was for name, was in start.items() if was.is_floating_point())
        return float(sum(float(change.square().sum()) for change in changes) ** 0.5)

    @property
    def trained(self) -> Tensors:
        """The weights that train."""
        return self._trained(self.weights)

    def _trained(self, weights: Tensors) -> Tensors:
        """Those that train: the others are what they were, to the last bit."""
        return {name: tensor for name, tensor in weights.items() if name not in self.frozen}


def _check_finite(model: Tensors, whose: str) -> None:
    if (odd := not_finite(model)) is not None:
        raise NonFiniteLossError(
            f"{whose} {odd} is NaN or infinite after the aggregation; "
            "lower optimizer.lr or server_optimizer.lr"
        )


def combined(
    models: Sequence[Tensors], weights: Sequence[float], how: ServerOptimizerSettings
) -> Tensors:
    """The models' average of the kind that is asked for."""
    if how.average == "mean":
        return average(models, weights)
    most = (len(models) - 1) // 2
    cut = most if how.average == "median" else min(most, math.ceil(how.trim * len(models)))
    return trimmed_mean(models, cut)


def trimmed_mean(models: Sequence[Tensors], cut: int) -> Tensors:
    """Of each weight the mean without the ``cut`` largest and smallest ones (Yin et al. 2018).

    With all but the middle one or two cut it is the median. What is no floating-point number is
    that of the first model.
    """
    own = slice(cut, len(models) - cut)
    return {
        name: torch.stack([model[name] for model in models]).sort(dim=0).values[own].mean(dim=0)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in models[0].items()
    }


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


@dataclass
class ServerOptimizer:
    """A step on the pseudo-gradient θ(t) − average.

    ``state`` is its memory, which lasts for the run: ``NAME/exp_avg`` of the weight ``NAME``.
    ``fedavg`` takes the average itself. With one local step of plain SGD that is eqs. (6)–(9).
    Weights that are not floating-point numbers are taken from the average in any case.
    """

    settings: ServerOptimizerSettings
    state: Tensors = field(default_factory=dict)

    def step(self, previous: Tensors, averaged: Tensors) -> Tensors:
        """The new model from the round's first weights and the units' average."""
        if self.settings.name == "fedavg":
            return averaged
        stepped = {k: v.clone() for k, v in previous.items() if v.is_floating_point()}
        optimizer = _build(self.settings, list(stepped.values()))
        for key, value in self.state.items():
            name, _, quantity = key.rpartition("/")
            optimizer.state[stepped[name]][quantity] = value
        for name, parameter in stepped.items():
            parameter.grad = previous[name] - averaged[name]
        optimizer.step()
        optimizer.zero_grad()
        self.state = {
            f"{name}/{quantity}": value
            for name, parameter in stepped.items()
            for quantity, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        return {**averaged, **stepped}


def _build(settings: ServerOptimizerSettings, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if settings.name == "adam":
        betas = (settings.momentum, settings.beta2)
        return torch.optim.Adam(parameters, lr=settings.lr, betas=betas, eps=settings.eps)
    momentum = settings.momentum if settings.name == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=momentum)
