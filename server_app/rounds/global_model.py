"""The model between rounds: one for all units, or one for each unit if nothing is averaged."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.config import Settings
from collapipe.errors import WAY_OUT_AFTER_AGGREGATION, Called, NonFiniteLossError
from collapipe.models.frozen import whole
from collapipe.models.part import select
from collapipe.models.split import EMBEDDING, HEAD, block_name
from collapipe.sections import ServerOptimizerSettings
from collapipe.tensors import Tensors, chosen, not_finite
from collapipe.wire.frozen_store import digest


@dataclass(frozen=True, slots=True)
class Updates:
    """The results of the units that finished a round."""

    models: Mapping[int, Tensors]  # the weights, or the masked update, of each unit that trained
    shares: Mapping[int, float]  # each unit's weight in an average, not normalised
    common: Tensors  # tensors that all units trained together; they replace the average


class GlobalModel:
    """The trainable weights after the last round, and the frozen ones, which never change.

    ``weights`` are the average. If nothing is averaged, they are the initial weights, and
    ``own_models`` has the weights of each unit that has trained. ``fixed`` has the frozen weights
    of each part, which may be opened when they are read, and ``digests`` their digests.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.weights: Tensors = {}
        self.fixed: Mapping[str, Tensors] = {}
        self.digests: Mapping[str, str] = {}
        self._opened: Mapping[str, Tensors] = {}
        self.own_models: dict[int, Tensors] = {}
        self._how = settings.server_optimizer
        self.server_optimizer = ServerOptimizer(self._how)

    def take(self, model: Tensors, frozen: Collection[str]) -> None:
        """Begin with a whole ``model``, in which the weights named in ``frozen`` never change."""
        parts = EMBEDDING, *map(block_name, range(self._settings.model.num_blocks)), HEAD
        fixed = {part: select(chosen(model, frozen), part) for part in parts}
        self.fixed = {part: tensors for part, tensors in fixed.items() if tensors}
        self.digests = {part: digest(tensors) for part, tensors in self.fixed.items()}
        self.weights = {name: each for name, each in model.items() if name not in frozen}

    def whole(self, weights: Tensors | None = None) -> Tensors:
        """Return the frozen weights and ``weights``; None: the average."""
        self._opened = dict(self.fixed)  # held, so that none are quantised again
        return whole(self._opened) | (self.weights if weights is None else weights)

    def of_unit(self, unit: int) -> Tensors:
        """The weights from which a unit's next round starts."""
        return self.own_models.get(unit, self.weights)

    def names(self, with_head: bool) -> set[str]:
        """Names of the weights that a unit receives and returns. ``with_head`` includes the
        head."""
        return {name for name in self.weights if with_head or not name.startswith(f"{HEAD}.")}

    def digests_on_units(self) -> dict[str, str]:
        """Return the digests of the parts that units hold. The head is included if units train or
        evaluate it."""
        with_head = self._settings.units_have_heads or self._settings.evaluation.on_units
        return {part: each for part, each in self.digests.items() if with_head or part != HEAD}

    def learn(self, round_: int, updates: Updates, called: Called) -> float | None:
        """Average the units' models, or store each unit's own model if nothing is averaged.

        Returns ‖θ(t+1) - θ(t)‖, or None if nothing is averaged. Raises ``NonFiniteLossError`` if a
        new weight is not finite; the model is then unchanged.
        """
        models = updates.models
        if not self._settings.framework.aggregate:
            for unit, model in models.items():
                _check_finite(model, f"round {round_}: {called(unit)}'s")
            own = {unit: {**self.of_unit(unit), **model} for unit, model in models.items()}
            self.own_models = {**self.own_models, **own}
            return None
        shares = [updates.shares[unit] for unit in models]
        return self.move(round_, combined([*models.values()], shares, self._how) | updates.common)

    def move(self, round_: int, averaged: Tensors) -> float:
        """Take the server optimiser's step towards ``averaged``, the average of the trainable
        weights. Returns ‖θ(t+1) - θ(t)‖; raises like ``learn``."""
        start = self.weights
        new = {**self.weights, **self.server_optimizer.step(start, averaged)}
        _check_finite(new, f"round {round_}:")
        self.weights = new
        changes = (new[name] - was for name, was in start.items() if was.is_floating_point())
        return float(sum(float(change.square().sum()) for change in changes) ** 0.5)


def _check_finite(model: Tensors, prefix: str) -> None:
    if (weight := not_finite(model)) is not None:
        raise NonFiniteLossError(
            f"{prefix} {weight} is NaN or infinite after the aggregation; "
            + WAY_OUT_AFTER_AGGREGATION
        )


def combined(
    models: Sequence[Tensors], weights: Sequence[float], how: ServerOptimizerSettings
) -> Tensors:
    """Average the models by ``how.average``: mean, median or trimmed mean."""
    if how.average == "mean":
        return average(models, weights)
    most = (len(models) - 1) // 2
    cut = most if how.average == "median" else min(most, math.ceil(how.trim * len(models)))
    return trimmed_mean(models, cut)


def trimmed_mean(models: Sequence[Tensors], cut: int) -> Tensors:
    """Average each weight without its ``cut`` largest and smallest values (Yin et al. 2018).

    This is the median if only the middle one or two values remain. Tensors that are not
    floating-point are copied from the first model.
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

    Integers and Booleans, such as a buffer that counts, are copied from the first model.
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
    """An optimiser that steps on the pseudo-gradient θ(t) − average.

    ``state`` lasts for the run and maps ``NAME/exp_avg`` to a moment of the weight ``NAME``.
    ``fedavg`` returns the average unchanged; with one local step of plain SGD this is
    eqs. (6)–(9). Tensors that are not floating-point are always taken from the average.
    """

    settings: ServerOptimizerSettings
    state: Tensors = field(default_factory=dict)

    def step(self, previous: Tensors, averaged: Tensors) -> Tensors:
        """Return the new model from the weights ``previous`` to the round and the units'
        average."""
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
