"""A part of a model that trains by itself: embedding, one encoder block, or the head.

An optimiser belongs to its part, so that its state can follow a block to another device, and all
parts together step exactly as one optimiser over the unsplit model would.
"""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from collapipe.errors import NonFiniteLossError
from collapipe.models.dropout import drawing_from
from collapipe.models.optimizer import Optimizer
from collapipe.models.split import Head
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors
from collapipe.torch_device import CPU


def clip_scale(squared_norms: Iterable[float], clip_norm: float | None) -> float:
    """Factor for all gradients from the parts' squared norms, summed in the order given.

    The same as ``torch.nn.utils.clip_grad_norm_`` over all parts at once. Raises
    ``NonFiniteLossError`` where the norm is NaN or infinite.
    """
    norm = sum(squared_norms) ** 0.5
    if not math.isfinite(norm):
        raise NonFiniteLossError(f"the gradients' norm is {norm}")
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


class Part:
    """A named module and its optimiser, both on ``device``."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        settings: OptimizerSettings,
        state: Mapping[str, Tensor] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.name, self.device = name, device
        self.module = module.to(device).train()
        self._optimizer = Optimizer(settings, self.module)
        self.load_optimizer_state(state or {})

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``optimizer_state`` returned, of any parts."""
        self._optimizer.load_state(select(state, self.name))

    def squared_norm(self) -> float:
        """Squared L2 norm of the part's gradient."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(get_total_norm(gradients)) ** 2

    def step(self, rate: float, scale: float) -> None:
        """Step with the gradients times ``scale``, then forget them."""
        if scale != 1.0:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._optimizer.step(rate)

    def forget_gradients(self) -> None:
        """Drop what was accumulated."""
        self._optimizer.forget_gradients()

    def weights(self) -> Tensors:
        """Weights by their names in the whole model, on the CPU."""
        weights = self.module.state_dict()
        return prefixed(self.name, {name: weight.cpu() for name, weight in weights.items()})

    def optimizer_state(self) -> Tensors:
        """Optimiser state by the same names, ``blocks.3.norm.weight/exp_avg``."""
        return prefixed(self.name, self._optimizer.state())


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Put a part's name before its tensors' names."""
    return {f"{name}.{key}": value.detach() for key, value in tensors.items()}


def select(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """The tensors of one part, by their names within it."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }


class HeadPart(Part):
    """The head, trained on activations: (activation, targets) → loss, gradient."""

    def answer(
        self,
        hidden: Tensor,
        mask: Tensor,
        targets: Tensor,
        target_tokens: int,
        generator: torch.Generator,
    ) -> tuple[float, Tensor]:
        """Loss of a micro-batch and its gradient by ``hidden`` [b, s, d], on the device that this
        came from; own gradients add up.

        ``target_tokens`` counts those of the whole batch, so that the micro-batches' losses and
        gradients sum to the batch's.
        """
        own = hidden.detach().to(self.device).requires_grad_()
        mask, targets = mask.to(self.device), targets.to(self.device)
        with drawing_from(generator):
            loss = cast(Head, self.module).loss(own, mask, targets) / target_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), cast(Tensor, own.grad).to(hidden.device)
