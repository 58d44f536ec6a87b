"""AdamW and SGD with momentum over a module's weights, by torch's functional optimisers.

The first ``torch.optim.Optimizer`` of a process imports torch's compiler: 800 modules, 76 MB, a
second on a fast core and several on a Raspberry Pi. The functional optimisers, which it calls too,
do not need these imports.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors


class Optimizer:
    """Optimiser of the trainable weights of ``module``; weights without a gradient do not change.

    State tensors are named after the weights, such as ``norm.weight/exp_avg``.
    """

    def __init__(self, settings: OptimizerSettings, module: nn.Module) -> None:
        self._settings = settings
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._state: Tensors = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Step with learning rate ``rate``, then drop the gradients."""
        names = [name for name, weight in self._weights.items() if weight.grad is not None]
        (self._adamw if self._settings.name == "adamw" else self._sgd)(names, rate)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the accumulated gradients."""
        for weight in self._weights.values():
            weight.grad = None

    def state(self) -> Tensors:
        """Return the state tensors on the CPU."""
        return {name: each.cpu() for name, each in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load copies of the tensors that ``state`` returned; unknown weights are ignored."""
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
        found = zip(keys, buffers, strict=False)  # empty without momentum
        self._state |= {key: each for key, each in found if each is not None}

    def _of(self, names: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the named weights and their gradients."""
        weights: list[Tensor] = [self._weights[name] for name in names]
        return weights, [each.grad for each in weights if each.grad is not None]


def moments(settings: OptimizerSettings) -> tuple[str, ...]:
    """Return the names of the optimiser's state tensors that have the weight's shape."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return "exp_avg", "exp_avg_sq"


def state_like(settings: OptimizerSettings, weights: Mapping[str, Tensor]) -> Tensors:
    """Return meta tensors shaped like ``Optimizer.state()`` after every weight has stepped."""
    like: Tensors = {}
    for name, weight in weights.items():  # torch.empty_like would import sympy for meta tensors
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        like |= {f"{name}/{key}": empty for key in moments(settings)}
        if settings.name == "adamw":
            like[f"{name}/step"] = torch.empty((), device="meta")
    return like
