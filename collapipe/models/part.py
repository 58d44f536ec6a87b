"""A part of a model with its own optimiser: the embedding, one encoder block, or the head.

The optimiser state moves with its part when a block moves to another device. All parts together
step exactly as one optimiser over the unsplit model would.
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
    """Return the factor that clips all gradients to ``clip_norm``, given each part's squared norm.

    Equals ``torch.nn.utils.clip_grad_norm_`` over all parts at once; squared norms are summed in
    the order given. Raises ``NonFiniteLossError`` if the total norm is NaN or infinite.
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
        """Load this part's state from ``state``, which may hold the states of other parts too."""
        self._optimizer.load_state(select(state, self.name))

    def squared_norm(self) -> float:
        """Return the squared L2 norm of the part's gradient."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(get_total_norm(gradients)) ** 2

    def step(self, rate: float, scale: float) -> None:
        """Step with learning rate ``rate`` and gradients times ``scale``; then drop gradients."""
        if scale != 1.0:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._optimizer.step(rate)

    def forget_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self._optimizer.forget_gradients()

    def weights(self) -> Tensors:
        """Return the weights on the CPU, keyed by their names in the whole model."""
        weights = self.module.state_dict()
        return prefixed(self.name, {name: weight.cpu() for name, weight in weights.items()})

    def optimizer_state(self) -> Tensors:
        """Return the optimiser state with keys such as ``blocks.3.norm.weight/exp_avg``."""
        return prefixed(self.name, self._optimizer.state())


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Prefix the tensors' names with a part's name."""
    return {f"{name}.{key}": value.detach() for key, value in tensors.items()}


def select(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors of one part, keyed by their names within the part."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }


class HeadPart(Part):
    """The head, which trains on activations: (activation, targets) → loss, gradient."""

    def answer(
        self,
        hidden: Tensor,
        mask: Tensor,
        targets: Tensor,
        target_tokens: int,
        generator: torch.Generator,
    ) -> tuple[float, Tensor]:
        """Return a micro-batch's loss and the gradient of ``hidden`` [b, s, d] on its device.

        Gradients of the head's weights accumulate. ``target_tokens`` is the number of target tokens
        of the whole batch, so that losses and gradients of micro-batches sum to the batch's.
        """
        own = hidden.detach().to(self.device).requires_grad_()
        mask, targets = mask.to(self.device), targets.to(self.device)
        with drawing_from(generator):
            loss = cast(Head, self.module).loss(own, mask, targets) / target_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), cast(Tensor, own.grad).to(hidden.device)
