"""AdamW, or SGD with momentum, over the weights of a module: torch's own steps and their state.

``torch.optim.Optimizer`` imports torch's compiler with its first instance: 800 modules, 76 MB and
a second of a fast core, seconds of a Raspberry Pi's. The functional forms, which it calls as well,
do without.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors


class Optimizer:
    """Steps what trains of ``module``, as ``settings`` say; a weight without a gradient stays.

    Tensors of its state are named after the weights, ``norm.weight/exp_avg``.
    """

    def __init__(self, settings: OptimizerSettings, module: nn.Module) -> None:
        self._settings = settings
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._state: Tensors = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Step with learning rate ``rate``, then forget the gradients."""
        names = [name for name, weight in self._weights.items() if weight.grad is not None]
        (self._adamw if self._settings.name == "adamw" else self._sgd)(names, rate)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop what was accumulated."""
        for weight in self._weights.values():
            weight.grad = None

    def state(self) -> Tensors:
        """Its tensors on the CPU, wherever they are."""
        return {name: each.cpu() for name, each in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from copies of what ``state`` returned; of unknown weights it is left out."""
        for key, value in state.items():
            weight = self._weights.get(key.rpartition("/")[0])
            if weight is not None:
                self._state[key] = value.to(weight.device, copy=True)

    def _adamw(self, names: Sequence[str], rate: float) -> None:
        own, state = self._settings, self._state
        weights, gradients = self._of(names)
        for name, weight in zip(names, weights, strict=True):
            if f"{name}/step" not in state:
                state[f"{name}/step"] = torch.zeros((), device=weight.device)
                state[f"{name}/exp_avg"] = torch.zeros_like(weight)
                state[f"{name}/exp_avg_sq"] = torch.zeros_like(weight)
        adamw(
            weights,
            gradients,
            [state[f"{name}/exp_avg"] for name in names],
            [state[f"{name}/exp_avg_sq"] for name in names],
            [],
            [state[f"{name}/step"] for name in names],
            fused=True,
            amsgrad=False,
            beta1=own.beta1,
            beta2=own.beta2,
            lr=rate,
            weight_decay=own.weight_decay,
            eps=own.eps,
            maximize=False,
        )

    def _sgd(self, names: Sequence[str], rate: float) -> None:
        own, keys = self._settings, [f"{name}/momentum_buffer" for name in names]
        buffers = [self._state.get(key) for key in keys] if own.momentum else []
        sgd(
            *self._of(names),
            buffers,
            fused=True,
            weight_decay=own.weight_decay,
            momentum=own.momentum,
            lr=rate,
            dampening=0,
            nesterov=False,
            maximize=False,
        )
        found = zip(keys, buffers, strict=False)  # without momentum there are none
        self._state |= {key: each for key, each in found if each is not None}

    def _of(self, names: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and their gradients."""
        weights: list[Tensor] = [self._weights[name] for name in names]
        return weights, [each.grad for each in weights if each.grad is not None]


def moments(settings: OptimizerSettings) -> tuple[str, ...]:
    """What the optimiser remembers of a weight once it has stepped, each of the weight's shape."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return "exp_avg", "exp_avg_sq"


def state_like(settings: OptimizerSettings, weights: Mapping[str, Tensor]) -> Tensors:
    """Tensors without values, as ``Optimizer.state`` has them of weights that all have stepped."""
    like: Tensors = {}
    for name, weight in weights.items():
        empty = torch.empty_like(weight, device="meta")
        like |= {f"{name}/{key}": empty for key in moments(settings)}
        if settings.name == "adamw":
            like[f"{name}/step"] = torch.empty((), device="meta")
    return like
