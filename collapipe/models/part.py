"""A part of a model with its own optimiser: the embedding, one encoder block, or the head.

The optimiser state moves with its part when a block moves to another device. All parts together
step exactly as one optimiser over the unsplit model would.

The first ``torch.optim.Optimizer`` of a process imports torch's compiler: 800 modules, 76 MB, a
second on a fast core and several on a Raspberry Pi. The functional optimisers, which it calls too,
do not need these imports.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collapipe.errors import ConfigError, NonFiniteLossError
from collapipe.models.dropout import drawing_from
from collapipe.models.split import summed_loss
from collapipe.process.torch_device import CPU, moved
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors


class Optimizer:
    """AdamW, or SGD with momentum, of the trainable weights of ``module``.

    Weights without a gradient do not change. State tensors are named after the weights, such as
    ``norm.weight/exp_avg``.
    """

    def __init__(self, settings: OptimizerSettings, module: nn.Module) -> None:
        self._settings = settings
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._state: Tensors = {}

    @torch.no_grad()
    def step(self, rate: float, scale: float = 1.0) -> None:
        """Step with learning rate ``rate`` and gradients times ``scale``; then drop gradients."""
        for gradient in self.gradients() if scale != 1.0 else ():
            gradient.mul_(scale)
        weights = {name: each for name, each in self._weights.items() if each.grad is not None}
        (self._adamw if self._settings.name == "adamw" else self._sgd)(weights, rate)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the accumulated gradients."""
        for weight in self._weights.values():
            weight.grad = None

    def swap_gradients(self, others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Put ``others``, if any, in place of the accumulated gradients, which are returned."""
        weights = list(self._weights.values())
        own = [weight.grad for weight in weights]
        for weight, other in zip(weights, others or [None] * len(weights), strict=True):
            weight.grad = other
        return own

    def gradients(self) -> list[Tensor]:
        """Return the accumulated gradients."""
        return [each.grad for each in self._weights.values() if each.grad is not None]

    def state(self) -> Tensors:
        """Return the state tensors on the CPU."""
        return {name: each.cpu() for name, each in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load copies of the tensors that ``state`` returned; unknown weights are ignored."""
        for key, value in state.items():
            weight = self._weights.get(key.rpartition("/")[0])
            if weight is not None:
                self._state[key] = value.to(weight.device, copy=True)

    def _adamw(self, weights: Mapping[str, Tensor], rate: float) -> None:
        own, state = self._settings, self._state
        for name, weight in weights.items():
            if f"{name}/step" not in state:
                state[f"{name}/step"] = torch.zeros((), device=weight.device)
                state[f"{name}/exp_avg"] = torch.zeros_like(weight)
                state[f"{name}/exp_avg_sq"] = torch.zeros_like(weight)
        adamw(
            [*weights.values()],
            self.gradients(),
            [state[f"{name}/exp_avg"] for name in weights],
            [state[f"{name}/exp_avg_sq"] for name in weights],
            [],
            [state[f"{name}/step"] for name in weights],
            fused=True,
            amsgrad=False,
            beta1=own.beta1,
            beta2=own.beta2,
            lr=rate,
            weight_decay=own.weight_decay,
            eps=own.eps,
            maximize=False,
        )

    def _sgd(self, weights: Mapping[str, Tensor], rate: float) -> None:
        own, state = self._settings, self._state
        keys = [f"{name}/momentum_buffer" for name in weights] if own.momentum else []
        for key, weight in zip(keys, weights.values(), strict=False):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        sgd(
            [*weights.values()],
            self.gradients(),
            [state[key] for key in keys],
            fused=True,
            weight_decay=own.weight_decay,
            momentum=own.momentum,
            lr=rate,
            dampening=0,
            nesterov=False,
            maximize=False,
        )


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


def clip_scale(squared_norms: Iterable[float], clip_norm: float | None) -> float:
    """Return the factor that clips all gradients to ``clip_norm``, given each part's squared norm.

    Equals ``torch.nn.utils.clip_grad_norm_`` over all parts at once; squared norms are summed in
    the order given. Raises ``NonFiniteLossError`` if the total norm is NaN or infinite.
    """
    norm = sum(squared_norms) ** 0.5
    if not math.isfinite(norm):
        raise NonFiniteLossError(f"the gradients' norm is {norm}")
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


class Part(Optimizer):
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
        self.module = moved(module, device).train()
        super().__init__(settings, self.module)
        self.load_optimizer_state(state or {})

    @property
    def trains(self) -> bool:
        """Whether any weight trains."""
        return bool(self._weights)

    @property
    def trained(self) -> list[str]:
        """The names of the trainable weights in the whole model, in the gradients' order."""
        return [f"{self.name}.{name}" for name in self._weights]

    @torch.no_grad()
    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the trainable weights from ``weights``, by their names in the whole model."""
        for name, own in self._weights.items():
            own.copy_(weights[f"{self.name}.{name}"])

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this part's state from ``state``, which may hold the states of other parts too."""
        self.load_state(select(state, self.name))

    def squared_norm(self) -> float:
        """Return the squared L2 norm of the part's gradient."""
        return float(get_total_norm(self.gradients())) ** 2

    def weights(self) -> Tensors:
        """Return the weights on the CPU, keyed by their names in the whole model."""
        return prefixed(self.name, {k: v.cpu() for k, v in self.module.state_dict().items()})

    def optimizer_state(self) -> Tensors:
        """Return the optimiser state with keys such as ``blocks.3.norm.weight/exp_avg``."""
        return prefixed(self.name, self.state())


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Prefix the tensors' names with a part's name."""
    return {f"{name}.{key}": value.detach() for key, value in tensors.items()}


def select(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors of one part, keyed by their names within the part."""
    own = f"{name}."
    return {k.removeprefix(own): value for k, value in tensors.items() if k.startswith(own)}


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
            loss = summed_loss(self.module, own, mask, targets) / target_tokens
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        if own.grad is None:
            raise ConfigError(
                f"model: {type(self.module).__qualname__}.loss has no gradient for its input; "
                "remove what detaches it, such as torch.no_grad()"
            )
        return float(loss.detach()), own.grad.to(hidden.device)
